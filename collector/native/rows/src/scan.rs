//! Checks a request at its receipt, and reads what identification needs of it.

use crate::check::{ANY_VALUE, Counts, EVENT, KEY_VALUE, LINK, RESOURCE, SCOPE, STATUS, check, check_text};
use crate::config::Names;
use crate::value::{Pair, Value};
use crate::wire::{Content, Malformed, fields, plain_numbers};

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    Traces,
    Logs,
}

/// Bounds that an item must keep.
pub struct Limits {
    pub earliest: u64,
    pub latest: u64,
    pub attributes: usize,
    pub tokens: usize,
}

/// Why an item is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defect {
    TraceId,
    SpanId,
    ParentId,
    Timestamp,
    Attributes,
    Tokens,
}

/// Sizes of rows, as collector/expansion.py estimates them.
const ROW_BYTES: u64 = 512;
const MESSAGE_BYTES: u64 = 16;
const OF_A_MESSAGE: u64 = 6;
/// Of a request that is not longer, messages are not counted there.
const SMALL: usize = 16_384;

#[derive(Default)]
pub struct Scan<'a> {
    pub counts: Counts,
    /// The approximate size of the rows in bytes.
    pub expanded: u64,
    /// The attributes with ids of each resource, as a KeyValueList.
    pub resources: Vec<Vec<u8>>,
    /// The number of items of each resource.
    pub groups: Vec<usize>,
    /// The same of items in a row, within a resource: (number, their attributes with ids).
    pub own: Vec<(usize, Vec<u8>)>,
    pub trace_ids: Vec<&'a [u8]>,
    pub span_ids: Vec<&'a [u8]>,
    pub parent_ids: Vec<&'a [u8]>,
    pub defects: Vec<(usize, Defect)>,
    /// Spans that open an attempt.
    pub opening: Vec<usize>,
    /// Spans that open or seal one.
    pub silent: Vec<usize>,
}

impl<'a> Scan<'a> {
    pub fn read(signal: Signal, request: &'a [u8], limits: &Limits, names: &Names) -> Result<Self, Malformed> {
        let mut scan = Scan::default();
        let mut shared_bytes = 0u64;
        scan.counts.messages += 1;
        for field in fields(request, 0) {
            let (1, Content::Bytes(group)) = field? else {
                scan.counts.others += 1;
                continue;
            };
            scan.part();
            shared_bytes += scan.group(signal, group, limits, names)?;
        }
        let controls = request.iter().filter(|byte| **byte < 0x20 && !matches!(byte, 0x08 | b'\t' | b'\n' | 0x0c | b'\r')).count() as u64;
        let messages = if request.len() <= SMALL { 0 } else { scan.counts.messages + scan.counts.values };
        let escaped = controls.saturating_sub(messages * OF_A_MESSAGE);
        scan.expanded = request.len() as u64 + 6 * escaped + messages * MESSAGE_BYTES + shared_bytes;
        Ok(scan)
    }

    fn part(&mut self) {
        self.counts.parts += 1;
        self.counts.messages += 1;
    }

    /// Reads a ResourceSpans or ResourceLogs, and returns the bytes that its rows share.
    fn group(&mut self, signal: Signal, group: &'a [u8], limits: &Limits, names: &Names) -> Result<u64, Malformed> {
        let (mut ids, mut shared, mut url, mut items, mut rows) = (Vec::new(), ROW_BYTES, 0, 0, 0);
        for field in fields(group, 1) {
            match field? {
                (1, Content::Bytes(resource)) => {
                    self.counts.others += 1;
                    check(&RESOURCE, resource, 2, false, &mut self.counts)?;
                    shared += escaped_size(resource);
                    for field in fields(resource, 2) {
                        if let (1, Content::Bytes(key_value)) = field? {
                            add_id(key_value, Pair::read(key_value, 3)?.key, names, &mut ids);
                        }
                    }
                }
                (2, Content::Bytes(_)) => self.part(),
                (3, Content::Bytes(text)) => {
                    self.counts.others += 1;
                    check_text(text)?;
                    url = if signal == Signal::Logs { text.len() as u64 } else { 0 };
                }
                _ => self.counts.others += 1,
            }
        }
        shared += url;
        let mut run: Option<(usize, Vec<u8>)> = None;
        for field in fields(group, 1) {
            let (2, Content::Bytes(part)) = field? else { continue };
            let before = items;
            let (mut attributes, mut name, mut version, mut url) = (0, 0, 0, 0);
            for field in fields(part, 2) {
                match field? {
                    (1, Content::Bytes(scope)) => {
                        self.counts.others += 1;
                        check(&SCOPE, scope, 3, false, &mut self.counts)?;
                        attributes += escaped_size(scope);
                        for field in fields(scope, 3) {
                            match field? {
                                (1, Content::Bytes(text)) => name = text.len() as u64,
                                (2, Content::Bytes(text)) => version = text.len() as u64,
                                _ => {}
                            }
                        }
                    }
                    (2, Content::Bytes(item)) => {
                        self.part();
                        let mut item_ids = Vec::new();
                        match signal {
                            Signal::Traces => self.span(item, limits, names, &mut item_ids)?,
                            Signal::Logs => self.record(item, limits, names, &mut item_ids)?,
                        }
                        items += 1;
                        match &mut run {
                            Some((count, ids)) if *ids == item_ids => *count += 1,
                            _ => self.own.extend(run.replace((1, item_ids))),
                        }
                    }
                    (3, Content::Bytes(text)) => {
                        self.counts.others += 1;
                        check_text(text)?;
                        url = text.len() as u64;
                    }
                    _ => self.counts.others += 1,
                }
            }
            let own = match signal {
                Signal::Traces => name + version, // a span's row has nothing else of its scope
                Signal::Logs => attributes + url,
            };
            rows += (items - before) as u64 * (shared + own);
        }
        self.own.extend(run);
        self.groups.push(items);
        self.resources.push(ids);
        Ok(rows)
    }

    fn span(&mut self, span: &'a [u8], limits: &Limits, names: &Names, ids: &mut Vec<u8>) -> Result<(), Malformed> {
        let (mut trace_id, mut span_id, mut parent_id): (&[u8], &[u8], &[u8]) = (b"", b"", b"");
        let (mut name, mut start, mut end, mut event_late): (&[u8], u64, u64, bool) = (b"", 0, 0, false);
        let (mut attributes, mut tokens) = (0, 0);
        for field in fields(span, 3) {
            match field? {
                (1, Content::Bytes(id)) => trace_id = id,
                (2, Content::Bytes(id)) => span_id = id,
                (3, Content::Bytes(text)) => check_text(text)?,
                (4, Content::Bytes(id)) => parent_id = id,
                (5, Content::Bytes(text)) => {
                    check_text(text)?;
                    name = text;
                }
                (7, Content::Fixed64(stamp)) => start = stamp,
                (8, Content::Fixed64(stamp)) => end = stamp,
                (9, Content::Bytes(key_value)) => {
                    check(&KEY_VALUE, key_value, 4, false, &mut self.counts)?;
                    attributes += 1;
                    let key = key_of(key_value)?;
                    add_id(key_value, key, names, ids);
                    if names.token(key).is_some() && key_value.len() > 2 * limits.tokens {
                        tokens = tokens.max(list_length(&Pair::read(key_value, 4)?.value)?);
                    }
                }
                (11, Content::Bytes(event)) => {
                    check(&EVENT, event, 4, false, &mut self.counts)?;
                    let mut stamp = 0;
                    for field in fields(event, 4) {
                        if let (1, Content::Fixed64(own)) = field? {
                            stamp = own;
                        }
                    }
                    event_late |= stamp > limits.latest;
                }
                (13, Content::Bytes(link)) => check(&LINK, link, 4, false, &mut self.counts)?,
                (15, Content::Bytes(status)) => check(&STATUS, status, 4, false, &mut self.counts)?,
                _ => {}
            }
        }
        let index = self.trace_ids.len();
        let times = limits.earliest..=limits.latest;
        let defect = if trace_id.len() != 16 || is_zero(trace_id) {
            Some(Defect::TraceId)
        } else if span_id.len() != 8 || is_zero(span_id) {
            Some(Defect::SpanId)
        } else if !matches!(parent_id.len(), 0 | 8) {
            Some(Defect::ParentId)
        } else if !times.contains(&start) || !times.contains(&end) || event_late {
            Some(Defect::Timestamp)
        } else if attributes > limits.attributes {
            Some(Defect::Attributes)
        } else if tokens > limits.tokens {
            Some(Defect::Tokens)
        } else {
            None
        };
        self.defects.extend(defect.map(|defect| (index, defect)));
        if name == names.attempt {
            self.silent.push(index);
            if is_zero(parent_id) {
                self.opening.push(index);
            }
        } else if name == names.seal {
            self.silent.push(index);
        }
        self.trace_ids.push(trace_id);
        self.span_ids.push(span_id);
        self.parent_ids.push(parent_id);
        Ok(())
    }

    fn record(&mut self, record: &'a [u8], limits: &Limits, names: &Names, ids: &mut Vec<u8>) -> Result<(), Malformed> {
        let (mut trace_id, mut span_id): (&[u8], &[u8]) = (b"", b"");
        let (mut stamp, mut observed) = (0, 0);
        for field in fields(record, 3) {
            match field? {
                (1, Content::Fixed64(own)) => stamp = own,
                (3 | 12, Content::Bytes(text)) => check_text(text)?,
                (5, Content::Bytes(body)) => check(&ANY_VALUE, body, 4, false, &mut self.counts)?,
                (6, Content::Bytes(key_value)) => {
                    check(&KEY_VALUE, key_value, 4, false, &mut self.counts)?;
                    add_id(key_value, key_of(key_value)?, names, ids);
                }
                (9, Content::Bytes(id)) => trace_id = id,
                (10, Content::Bytes(id)) => span_id = id,
                (11, Content::Fixed64(own)) => observed = own,
                _ => {}
            }
        }
        let index = self.trace_ids.len();
        let stamp = if stamp == 0 { observed } else { stamp };
        let defect = if !matches!(trace_id.len(), 0 | 16) {
            Some(Defect::TraceId)
        } else if !matches!(span_id.len(), 0 | 8) {
            Some(Defect::SpanId)
        } else if stamp != 0 && !(limits.earliest..=limits.latest).contains(&stamp) {
            Some(Defect::Timestamp)
        } else {
            None
        };
        self.defects.extend(defect.map(|defect| (index, defect)));
        self.trace_ids.push(trace_id);
        self.span_ids.push(span_id);
        Ok(())
    }
}

fn is_zero(id: &[u8]) -> bool {
    id.iter().all(|byte| *byte == 0)
}

fn key_of(key_value: &[u8]) -> Result<&[u8], Malformed> {
    let mut key: &[u8] = b"";
    for field in fields(key_value, 4) {
        if let (1, Content::Bytes(own)) = field? {
            key = own;
        }
    }
    Ok(key)
}

fn add_id(key_value: &[u8], key: &[u8], names: &Names, ids: &mut Vec<u8>) {
    if names.ids.iter().any(|each| each == key) {
        ids.push(0x0a); // field 1 of a KeyValueList
        crate::block::push_string(key_value, ids);
    }
}

fn list_length(value: &Value) -> Result<usize, Malformed> {
    let Value::List(pieces) = value else { return Ok(0) };
    let mut length = 0;
    for piece in pieces {
        let (plain, start) = plain_numbers(piece);
        length += plain as usize;
        for field in fields(&piece[start..], 6) {
            length += usize::from(matches!(field?, (1, Content::Bytes(_))));
        }
    }
    Ok(length)
}

/// The size of a text in JSON, of which these bytes take up to six.
fn escaped_size(bytes: &[u8]) -> u64 {
    let longer = bytes.iter().filter(|byte| **byte < 0x20 || matches!(**byte, b'"' | b'\\')).count();
    (bytes.len() + 5 * longer) as u64
}
