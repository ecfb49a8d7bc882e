//! Rows of otel_logs.

use crate::attributes::{Map, push_type};
use crate::block::{Block, Column, Refused, column};
use crate::config::Names;
use crate::traces::{Given, Reader, Shared, each_group, inner, nanoseconds, scope_names};
use crate::value::{Value, write_text};
use crate::wire::{Content, Malformed, fields};

pub static COLUMNS: [Column; 23] = [
    column("Timestamp", "DateTime64(9)", 1),
    column("TraceId", "String", 1),
    column("SpanId", "String", 1),
    column("TraceFlags", "UInt8", 1),
    column("SeverityText", "String", 1),
    column("SeverityNumber", "UInt8", 1),
    column("ServiceName", "String", 1),
    column("Body", "String", 1),
    column("ResourceSchemaUrl", "String", 1),
    column("ResourceAttributes", "Map(String, String)", 3),
    column("ScopeSchemaUrl", "String", 1),
    column("ScopeName", "String", 1),
    column("ScopeVersion", "String", 1),
    column("ScopeAttributes", "Map(String, String)", 3),
    column("LogAttributes", "Map(String, String)", 3),
    column("EventName", "String", 1),
    column("RolloutId", "String", 1),
    column("AttemptId", "String", 1),
    column("SequenceId", "UInt64", 1),
    column("AttrTypes", "Map(String, String)", 3),
    column("ReceivedAt", "DateTime64(3)", 1),
    column("BatchId", "UInt64", 1),
    column("BatchPos", "UInt32", 1),
];

// The first stream of each column.
const TIMESTAMP: usize = 0;
const TRACE_ID: usize = 1;
const SPAN_ID: usize = 2;
const FLAGS: usize = 3;
const SEVERITY_TEXT: usize = 4;
const SEVERITY: usize = 5;
const SERVICE: usize = 6;
const BODY: usize = 7;
const RESOURCE_URL: usize = 8;
const RESOURCE: usize = 9;
const SCOPE_URL: usize = 12;
const SCOPE_NAME: usize = 13;
const SCOPE_VERSION: usize = 14;
const SCOPE: usize = 15;
const ATTRIBUTES: usize = 18;
const EVENT_NAME: usize = 21;
const ROLLOUT: usize = 22;
const ATTEMPT: usize = 23;
const SEQUENCE: usize = 24;
const TYPES: usize = 25;
const RECEIVED: usize = 28;
const BATCH: usize = 29;
const POSITION: usize = 30;

/// Adds the rows of a request's log records; `given` has the explicit number of each, or 0. Returns the number of repeated attribute keys, which were dropped.
pub fn add(block: &mut Block, request: &[u8], given: &Given, names: &Names) -> Result<u64, Refused> {
    each_group(block, request, given, names, Reader::logs)
}

#[derive(Default)]
struct Scope<'a> {
    name: &'a [u8],
    version: &'a [u8],
    attributes: Map,
    /// Of the resource and of the scope.
    types: Map,
}

#[derive(Default)]
struct Record<'a> {
    stamp: u64,
    observed: u64,
    severity: u64,
    severity_text: &'a [u8],
    body: Value<'a>,
    flags: u32,
    trace_id: &'a [u8],
    span_id: &'a [u8],
    event_name: &'a [u8],
}

impl<'a> Record<'a> {
    fn read(record: &'a [u8]) -> Result<Self, Malformed> {
        let mut read = Record::default();
        for field in fields(record, 3) {
            match field? {
                (1, Content::Fixed64(stamp)) => read.stamp = stamp,
                (2, Content::Varint(number)) => read.severity = number,
                (3, Content::Bytes(text)) => read.severity_text = text,
                (5, Content::Bytes(body)) => read.body.merge(body, 4)?,
                (8, Content::Fixed32(flags)) => read.flags = flags,
                (9, Content::Bytes(id)) => read.trace_id = id,
                (10, Content::Bytes(id)) => read.span_id = id,
                (11, Content::Fixed64(stamp)) => read.observed = stamp,
                (12, Content::Bytes(text)) => read.event_name = text,
                _ => {}
            }
        }
        Ok(read)
    }
}

/// The last text of a field.
fn text(message: &[u8], number: u32, depth: u32) -> Result<&[u8], Malformed> {
    Ok(inner(&[message], number, depth)?.last().copied().unwrap_or_default())
}

fn known(id: &[u8]) -> &[u8] {
    if id.iter().any(|byte| *byte != 0) { id } else { b"" }
}

impl<'a> Reader<'a, '_> {
    fn logs(&mut self, group: &'a [u8]) -> Result<(), Refused> {
        let shared = Shared::read(&inner(&[group], 1, 1)?, self.names, &mut self.texts)?;
        let url = text(group, 3, 1)?;
        for part in inner(&[group], 2, 1)? {
            self.part(part, &shared, url)?;
        }
        Ok(())
    }

    fn part(&mut self, part: &'a [u8], shared: &Shared, resource_url: &[u8]) -> Result<(), Refused> {
        let scope = self.scope(&inner(&[part], 1, 2)?, shared)?;
        let scope_url = text(part, 3, 2)?;
        let (mut texts, mut types, mut body) = (Map::default(), Map::default(), Vec::new());
        for field in fields(part, 2) {
            let (2, Content::Bytes(bytes)) = field? else { continue };
            let Some(item) = self.cursor.next_item()? else { continue };
            let record = Record::read(bytes)?;
            texts.clear();
            types.clear();
            body.clear();
            types.extend(&scope.types);
            if let Some(kind) = write_text(&record.body, 4, &mut body, &mut self.texts.repeated)?
                && !matches!(record.body, Value::Empty)
            {
                push_type(b"", b"body:", &kind.text(), &mut types);
            }
            self.texts.add(&inner(&[bytes], 6, 3)?, b"", 4, &mut texts, &mut types)?;
            let received = u64::try_from(self.given.received_ms).unwrap_or(0).saturating_mul(1_000_000);
            let stamp = [record.stamp, record.observed, received].into_iter().find(|stamp| *stamp != 0).unwrap_or(0);
            let block = &mut *self.block;
            block.append(TIMESTAMP, &nanoseconds(stamp));
            block.hex(TRACE_ID, known(record.trace_id));
            block.hex(SPAN_ID, known(record.span_id));
            block.append(FLAGS, &[record.flags as u8]);
            block.string(SEVERITY_TEXT, record.severity_text);
            block.append(SEVERITY, &[record.severity as u8]);
            block.string(SERVICE, &shared.service);
            block.string(BODY, &body);
            block.string(RESOURCE_URL, resource_url);
            shared.attributes.write(block, RESOURCE);
            block.string(SCOPE_URL, scope_url);
            block.string(SCOPE_NAME, scope.name);
            block.string(SCOPE_VERSION, scope.version);
            scope.attributes.write(block, SCOPE);
            texts.write(block, ATTRIBUTES);
            block.string(EVENT_NAME, record.event_name);
            block.string(ROLLOUT, item.rollout.as_bytes());
            block.string(ATTEMPT, item.attempt.as_bytes());
            block.append(SEQUENCE, &item.number.to_le_bytes());
            types.write(block, TYPES);
            block.append(RECEIVED, &self.given.received_ms.to_le_bytes());
            block.append(BATCH, &self.given.batch.to_le_bytes());
            block.append(POSITION, &item.position.to_le_bytes());
            block.rows += 1;
        }
        Ok(())
    }

    fn scope(&mut self, pieces: &[&'a [u8]], shared: &Shared) -> Result<Scope<'a>, Malformed> {
        let (name, version) = scope_names(pieces)?;
        let mut scope = Scope { name, version, ..Scope::default() };
        scope.types.extend(&shared.types);
        self.texts.add(&inner(pieces, 3, 3)?, b"scope:", 4, &mut scope.attributes, &mut scope.types)?;
        Ok(scope)
    }
}
