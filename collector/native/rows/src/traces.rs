//! Rows of otel_traces.

use crate::attributes::{Map, Texts};
use crate::block::{Block, Column, Refused, column};
use crate::config::Names;
use crate::value::{Fit, Pair, read_floats, read_ids};
use crate::wire::{Content, Malformed, fields};

pub static COLUMNS: [Column; 34] = [
    column("Timestamp", "DateTime64(9)", 1),
    column("TraceId", "String", 1),
    column("SpanId", "String", 1),
    column("ParentSpanId", "String", 1),
    column("TraceState", "String", 1),
    column("SpanName", "String", 1),
    column("SpanKind", "String", 1),
    column("ServiceName", "String", 1),
    column("ResourceAttributes", "Map(String, String)", 3),
    column("ScopeName", "String", 1),
    column("ScopeVersion", "String", 1),
    column("SpanAttributes", "Map(String, String)", 3),
    column("Duration", "UInt64", 1),
    column("StatusCode", "String", 1),
    column("StatusMessage", "String", 1),
    column("Events.Timestamp", "Array(DateTime64(9))", 2),
    column("Events.Name", "Array(String)", 2),
    column("Events.Attributes", "Array(Map(String, String))", 4),
    column("Links.TraceId", "Array(String)", 2),
    column("Links.SpanId", "Array(String)", 2),
    column("Links.TraceState", "Array(String)", 2),
    column("Links.Attributes", "Array(Map(String, String))", 4),
    column("RolloutId", "String", 1),
    column("AttemptId", "String", 1),
    column("SequenceId", "UInt64", 1),
    column("PromptTokenIds", "Array(UInt32)", 2),
    column("ResponseTokenIds", "Array(UInt32)", 2),
    column("ResponseLogprobs", "Array(Float32)", 2),
    column("AttrTypes", "Map(String, String)", 3),
    column("ReceivedAt", "DateTime64(3)", 1),
    column("BatchId", "UInt64", 1),
    column("BatchPos", "UInt32", 1),
    column("Facts", "Map(String, String)", 3),
    column("HasMedia", "Bool", 1),
];

// The first stream of each column: a new column comes last, for the others keep their numbers.
const TIMESTAMP: usize = 0;
const TRACE_ID: usize = 1;
const SPAN_ID: usize = 2;
const PARENT_ID: usize = 3;
const TRACE_STATE: usize = 4;
const SPAN_NAME: usize = 5;
const SPAN_KIND: usize = 6;
const SERVICE: usize = 7;
const RESOURCE: usize = 8;
const SCOPE_NAME: usize = 11;
const SCOPE_VERSION: usize = 12;
const ATTRIBUTES: usize = 13;
const DURATION: usize = 16;
const STATUS_CODE: usize = 17;
const STATUS_MESSAGE: usize = 18;
const EVENT_TIMES: usize = 19;
const EVENT_NAMES: usize = 21;
const EVENT_ATTRIBUTES: usize = 23;
const LINK_TRACES: usize = 27;
const LINK_SPANS: usize = 29;
const LINK_STATES: usize = 31;
const LINK_ATTRIBUTES: usize = 33;
const ROLLOUT: usize = 37;
const ATTEMPT: usize = 38;
const SEQUENCE: usize = 39;
const TOKENS: [usize; 3] = [40, 42, 44];
const TYPES: usize = 46;
const RECEIVED: usize = 49;
const BATCH: usize = 50;
const POSITION: usize = 51;
const FACTS: usize = 52;
const HAS_MEDIA: usize = 55;

const LOGPROBS: usize = 2;
const KINDS: [&[u8]; 6] = [b"Unspecified", b"Internal", b"Server", b"Client", b"Producer", b"Consumer"];
const STATUSES: [&[u8]; 3] = [b"Unset", b"Ok", b"Error"];
const EARLIEST: u64 = 100_000_000_000_000_000;

/// Nanoseconds as DateTime64(9): an event or a record without a time has 0.
pub fn nanoseconds(stamp: u64) -> [u8; 8] {
    (if stamp >= EARLIEST { stamp } else { 0 }).to_le_bytes()
}

/// What only the collector knows of a request.
pub struct Given<'a> {
    /// Of so many items in a row: (rollout id, attempt id), or None if they are refused.
    pub runs: &'a [(usize, Option<(&'a str, &'a str)>)],
    /// The sequence number of each item that is not refused.
    pub numbers: &'a [u64],
    pub received_ms: i64,
    pub batch: u64,
    /// The position in the batch of the first item that is not refused.
    pub first: u32,
    /// Whether the item at a position becomes a row.
    pub takes: &'a dyn Fn(u32) -> bool,
}

/// The next item's identity, number and position.
pub struct Cursor<'g> {
    given: &'g Given<'g>,
    run: usize,
    used: usize,
    taken: usize,
}

pub struct Item<'g> {
    pub rollout: &'g str,
    pub attempt: &'g str,
    pub number: u64,
    pub position: u32,
}

impl<'g> Cursor<'g> {
    pub fn new(given: &'g Given<'g>) -> Self {
        Cursor { given, run: 0, used: 0, taken: 0 }
    }

    /// The next item; None if it does not become a row.
    pub fn next_item(&mut self) -> Result<Option<Item<'g>>, Refused> {
        while self.given.runs.get(self.run).is_some_and(|run| run.0 == self.used) {
            (self.run, self.used) = (self.run + 1, 0);
        }
        let (_, identity) = self.given.runs.get(self.run).ok_or(Refused::Mismatch)?;
        self.used += 1;
        let Some((rollout, attempt)) = *identity else { return Ok(None) };
        let number = *self.given.numbers.get(self.taken).ok_or(Refused::Mismatch)?;
        let position = u32::try_from(self.taken).ok().and_then(|taken| self.given.first.checked_add(taken)).ok_or(Refused::Mismatch)?;
        self.taken += 1;
        Ok((self.given.takes)(position).then_some(Item { rollout, attempt, number, position }))
    }

    pub fn end(&self) -> Result<(), Refused> {
        let left: usize = self.given.runs.iter().skip(self.run).map(|run| run.0).sum();
        if left == self.used && self.taken == self.given.numbers.len() { Ok(()) } else { Err(Refused::Mismatch) }
    }
}

/// A resource, as each of its rows has it.
#[derive(Default)]
pub struct Shared {
    pub attributes: Map,
    pub types: Map,
    pub service: Vec<u8>,
}

impl Shared {
    /// Reads the pieces of a Resource, which is nested in two messages.
    pub fn read<'a>(pieces: &[&'a [u8]], names: &Names, texts: &mut Texts<'a>) -> Result<Self, Malformed> {
        let mut shared = Shared::default();
        texts.start();
        for key_value in inner(pieces, 1, 2)? {
            let pair = Pair::read(key_value, 3)?;
            if texts.is_new(&pair) {
                let text = texts.push(&pair, b"resource:", 3, &mut shared.attributes, &mut shared.types)?;
                if pair.key == names.service {
                    shared.service = text.to_vec();
                }
            }
        }
        Ok(shared)
    }
}

/// The contents of a field of messages in a message that is given in pieces.
pub fn inner<'a>(pieces: &[&'a [u8]], number: u32, depth: u32) -> Result<Vec<&'a [u8]>, Malformed> {
    let mut found = Vec::new();
    for piece in pieces {
        for field in fields(piece, depth) {
            match field? {
                (each, Content::Bytes(content)) if each == number => found.push(content),
                _ => {}
            }
        }
    }
    Ok(found)
}

/// Adds the rows of a request's spans. Returns the number of repeated attribute keys, which were dropped.
pub fn add(block: &mut Block, request: &[u8], given: &Given, names: &Names) -> Result<u64, Refused> {
    each_group(block, request, given, names, Reader::spans)
}

/// Reads the groups of a request (ResourceSpans or ResourceLogs) with `read`, and returns the number of repeated attribute keys.
pub fn each_group<'a, 'g>(
    block: &'g mut Block,
    request: &'a [u8],
    given: &'g Given<'g>,
    names: &'g Names,
    read: fn(&mut Reader<'a, 'g>, &'a [u8]) -> Result<(), Refused>,
) -> Result<u64, Refused> {
    let mut reader = Reader { block, given, names, cursor: Cursor::new(given), texts: Texts::default() };
    for group in inner(&[request], 1, 0)? {
        read(&mut reader, group)?;
    }
    reader.cursor.end()?;
    Ok(reader.texts.repeated)
}

/// What reading a request's groups shares.
pub struct Reader<'a, 'g> {
    pub block: &'g mut Block,
    pub given: &'g Given<'g>,
    pub names: &'g Names,
    pub cursor: Cursor<'g>,
    pub texts: Texts<'a>,
}

/// The last name and version of a scope that is given in pieces.
pub fn scope_names<'a>(pieces: &[&'a [u8]]) -> Result<(&'a [u8], &'a [u8]), Malformed> {
    let (mut name, mut version): (&[u8], &[u8]) = (b"", b"");
    for piece in pieces {
        for field in fields(piece, 3) {
            match field? {
                (1, Content::Bytes(text)) => name = text,
                (2, Content::Bytes(text)) => version = text,
                _ => {}
            }
        }
    }
    Ok((name, version))
}

/// The fields of a span; those that are lists are kept from one span to the next.
#[derive(Default)]
struct Span<'a> {
    trace_id: &'a [u8],
    span_id: &'a [u8],
    trace_state: &'a [u8],
    parent_id: &'a [u8],
    name: &'a [u8],
    kind: i32,
    start: u64,
    end: u64,
    attributes: Vec<&'a [u8]>,
    events: Vec<&'a [u8]>,
    links: Vec<&'a [u8]>,
    status: i32,
    message: &'a [u8],
}

impl<'a> Span<'a> {
    fn read(&mut self, span: &'a [u8]) -> Result<(), Malformed> {
        let (mut attributes, mut events, mut links) =
            (std::mem::take(&mut self.attributes), std::mem::take(&mut self.events), std::mem::take(&mut self.links));
        for list in [&mut attributes, &mut events, &mut links] {
            list.clear();
        }
        *self = Span { attributes, events, links, ..Span::default() };
        for field in fields(span, 3) {
            match field? {
                (1, Content::Bytes(id)) => self.trace_id = id,
                (2, Content::Bytes(id)) => self.span_id = id,
                (3, Content::Bytes(text)) => self.trace_state = text,
                (4, Content::Bytes(id)) => self.parent_id = id,
                (5, Content::Bytes(text)) => self.name = text,
                (6, Content::Varint(kind)) => self.kind = kind as i32,
                (7, Content::Fixed64(stamp)) => self.start = stamp,
                (8, Content::Fixed64(stamp)) => self.end = stamp,
                (9, Content::Bytes(attribute)) => self.attributes.push(attribute),
                (11, Content::Bytes(event)) => self.events.push(event),
                (13, Content::Bytes(link)) => self.links.push(link),
                (15, Content::Bytes(status)) => {
                    for field in fields(status, 4) {
                        match field? {
                            (2, Content::Bytes(text)) => self.message = text,
                            (3, Content::Varint(code)) => self.status = code as i32,
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn name_of(number: i32, names: &'static [&'static [u8]]) -> &'static [u8] {
    usize::try_from(number).ok().and_then(|index| names.get(index)).unwrap_or(&names[0])
}

impl<'a> Reader<'a, '_> {
    fn spans(&mut self, group: &'a [u8]) -> Result<(), Refused> {
        let shared = Shared::read(&inner(&[group], 1, 1)?, self.names, &mut self.texts)?;
        let mut span = Span::default();
        let (mut texts, mut types) = (Map::default(), Map::default());
        for part in inner(&[group], 2, 1)? {
            let (scope_name, scope_version) = scope_names(&inner(&[part], 1, 2)?)?;
            for field in fields(part, 2) {
                let (2, Content::Bytes(bytes)) = field? else { continue };
                let Some(item) = self.cursor.next_item()? else { continue };
                span.read(bytes)?;
                texts.clear();
                types.clear();
                types.extend(&shared.types);
                self.block.append(RECEIVED, &self.given.received_ms.to_le_bytes());
                self.block.append(BATCH, &self.given.batch.to_le_bytes());
                self.block.append(POSITION, &item.position.to_le_bytes());
                self.block.string(ROLLOUT, item.rollout.as_bytes());
                self.block.string(ATTEMPT, item.attempt.as_bytes());
                self.block.append(SEQUENCE, &item.number.to_le_bytes());
                self.block.string(SERVICE, &shared.service);
                shared.attributes.write(self.block, RESOURCE);
                self.block.string(SCOPE_NAME, scope_name);
                self.block.string(SCOPE_VERSION, scope_version);
                self.span(&span);
                self.attributes(&span, &mut texts, &mut types)?;
                self.events(&span, &mut texts, &mut types)?;
                self.links(&span, &mut texts, &mut types)?;
                types.write(self.block, TYPES);
                self.block.rows += 1;
            }
        }
        Ok(())
    }

    fn span(&mut self, span: &Span) {
        self.block.append(TIMESTAMP, &nanoseconds(span.start));
        self.block.hex(TRACE_ID, span.trace_id);
        self.block.hex(SPAN_ID, span.span_id);
        self.block.hex(PARENT_ID, if span.parent_id.iter().any(|byte| *byte != 0) { span.parent_id } else { b"" });
        self.block.string(TRACE_STATE, span.trace_state);
        self.block.string(SPAN_NAME, span.name);
        self.block.string(SPAN_KIND, name_of(span.kind, &KINDS));
        self.block.append(DURATION, &span.end.saturating_sub(span.start).to_le_bytes());
        self.block.string(STATUS_CODE, name_of(span.status, &STATUSES));
        self.block.string(STATUS_MESSAGE, span.message);
    }

    /// Writes the attributes, the token columns, the facts and whether there is media.
    fn attributes(&mut self, span: &Span<'a>, texts: &mut Map, types: &mut Map) -> Result<(), Malformed> {
        let mut facts = Map::default();
        let mut tokens: [Option<Vec<u8>>; 3] = [None, None, None];
        let mut has_media = false;
        self.texts.start();
        for key_value in &span.attributes {
            let pair = Pair::read(key_value, 4)?;
            if !self.texts.is_new(&pair) {
                continue;
            }
            if let Some(place) = self.names.token(pair.key) {
                let mut numbers = Vec::new();
                let fit = match place {
                    LOGPROBS => read_floats(&pair.value, 5, &mut numbers)?,
                    _ if read_ids(&pair.value, 5, &mut numbers)? => Fit::Exact,
                    _ => Fit::No,
                };
                if fit == Fit::No {
                    numbers.clear();
                }
                tokens[place] = Some(numbers);
                if fit == Fit::Exact {
                    types.push(pair.key, b"column");
                    continue;
                }
            }
            let text = self.texts.push(&pair, b"", 4, texts, types)?;
            if self.names.is_fact(pair.key) {
                facts.push(pair.key, text);
            }
            if pair.key == self.names.messages {
                has_media = self.names.media.is_match(text);
            }
        }
        texts.write(self.block, ATTRIBUTES);
        facts.write(self.block, FACTS);
        self.block.append(HAS_MEDIA, &[u8::from(has_media)]);
        for (stream, numbers) in TOKENS.iter().zip(&tokens) {
            let numbers = numbers.as_deref().unwrap_or_default();
            self.block.end_list(*stream, numbers.len() as u64 / 4);
            self.block.append(stream + 1, numbers);
        }
        Ok(())
    }

    fn events(&mut self, span: &Span<'a>, texts: &mut Map, types: &mut Map) -> Result<(), Malformed> {
        for (index, event) in span.events.iter().enumerate() {
            let (mut stamp, mut name): (u64, &[u8]) = (0, b"");
            for field in fields(event, 4) {
                match field? {
                    (1, Content::Fixed64(own)) => stamp = own,
                    (2, Content::Bytes(text)) => name = text,
                    _ => {}
                }
            }
            texts.clear();
            self.texts.add(&inner(&[event], 3, 4)?, format!("event.{index}:").as_bytes(), 5, texts, types)?;
            self.block.append(EVENT_TIMES + 1, &nanoseconds(stamp));
            self.block.string(EVENT_NAMES + 1, name);
            texts.write(self.block, EVENT_ATTRIBUTES + 1);
        }
        for stream in [EVENT_TIMES, EVENT_NAMES, EVENT_ATTRIBUTES] {
            self.block.end_list(stream, span.events.len() as u64);
        }
        Ok(())
    }

    fn links(&mut self, span: &Span<'a>, texts: &mut Map, types: &mut Map) -> Result<(), Malformed> {
        for (index, link) in span.links.iter().enumerate() {
            let (mut trace_id, mut span_id, mut state): (&[u8], &[u8], &[u8]) = (b"", b"", b"");
            for field in fields(link, 4) {
                match field? {
                    (1, Content::Bytes(id)) => trace_id = id,
                    (2, Content::Bytes(id)) => span_id = id,
                    (3, Content::Bytes(text)) => state = text,
                    _ => {}
                }
            }
            texts.clear();
            self.texts.add(&inner(&[link], 4, 4)?, format!("link.{index}:").as_bytes(), 5, texts, types)?;
            self.block.hex(LINK_TRACES + 1, trace_id);
            self.block.hex(LINK_SPANS + 1, span_id);
            self.block.string(LINK_STATES + 1, state);
            texts.write(self.block, LINK_ATTRIBUTES + 1);
        }
        for stream in [LINK_TRACES, LINK_SPANS, LINK_STATES, LINK_ATTRIBUTES] {
            self.block.end_list(stream, span.links.len() as u64);
        }
        Ok(())
    }
}
