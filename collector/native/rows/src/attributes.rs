//! Attributes as maps of texts, beside a map of the types of those that are no strings.

use std::collections::HashSet;

use crate::block::{Block, push_string};
use crate::value::{Pair, write_text};
use crate::wire::Malformed;

/// A map as the Native format has it.
#[derive(Clone, Debug, Default)]
pub struct Map {
    count: u64,
    keys: Vec<u8>,
    values: Vec<u8>,
}

impl Map {
    pub fn clear(&mut self) {
        self.count = 0;
        self.keys.clear();
        self.values.clear();
    }

    pub fn push(&mut self, key: &[u8], value: &[u8]) {
        self.count += 1;
        push_string(key, &mut self.keys);
        push_string(value, &mut self.values);
    }

    pub fn extend(&mut self, other: &Map) {
        self.count += other.count;
        self.keys.extend_from_slice(&other.keys);
        self.values.extend_from_slice(&other.values);
    }

    /// Appends it as a value of the column whose offsets are in `stream`.
    pub fn write(&self, block: &mut Block, stream: usize) {
        block.end_list(stream, self.count);
        block.append(stream + 1, &self.keys);
        block.append(stream + 2, &self.values);
    }
}

/// The keys of a message's attributes so far: of a repeated key the first counts.
#[derive(Default)]
pub struct Seen<'a> {
    few: Vec<&'a [u8]>,
    many: HashSet<&'a [u8]>,
}

const FEW: usize = 24;

impl<'a> Seen<'a> {
    pub fn clear(&mut self) {
        self.few.clear();
        self.many.clear();
    }

    /// Notes a key, and returns whether it is new.
    pub fn is_new(&mut self, key: &'a [u8]) -> bool {
        if self.few.contains(&key) {
            return false;
        }
        if self.few.len() < FEW {
            self.few.push(key);
            return true;
        }
        self.many.insert(key)
    }
}

/// What is made of a row's attributes.
#[derive(Default)]
pub struct Texts<'a> {
    seen: Seen<'a>,
    text: Vec<u8>,
    pub repeated: u64,
}

impl<'a> Texts<'a> {
    /// Adds the KeyValues of one message, which are nested in `depth` others, to `texts`, and their types to `types`.
    pub fn add(&mut self, key_values: &[&'a [u8]], prefix: &[u8], depth: u32, texts: &mut Map, types: &mut Map) -> Result<(), Malformed> {
        self.start();
        for key_value in key_values {
            let pair = Pair::read(key_value, depth)?;
            if self.is_new(&pair) {
                self.push(&pair, prefix, depth, texts, types)?;
            }
        }
        Ok(())
    }

    /// Begins the attributes of another message.
    pub fn start(&mut self) {
        self.seen.clear();
    }

    pub fn is_new(&mut self, pair: &Pair<'a>) -> bool {
        let is_new = self.seen.is_new(pair.key);
        self.repeated += u64::from(!is_new);
        is_new
    }

    /// Adds one attribute, and returns its text.
    pub fn push(&mut self, pair: &Pair, prefix: &[u8], depth: u32, texts: &mut Map, types: &mut Map) -> Result<&[u8], Malformed> {
        self.text.clear();
        let kind = write_text(&pair.value, depth + 1, &mut self.text, &mut self.repeated)?;
        texts.push(pair.key, &self.text);
        if let Some(kind) = kind {
            push_type(pair.key, prefix, &kind.text(), types);
        }
        Ok(&self.text)
    }
}

/// Adds the type of an attribute: under its key, with a prefix that tells whose attribute it is. A span's own have none, unless the key
/// looks as if it had one.
pub fn push_type(key: &[u8], prefix: &[u8], kind: &[u8], types: &mut Map) {
    let prefix = if prefix.is_empty() && looks_prefixed(key) { b"span:" } else { prefix };
    types.push(&[prefix, key].concat(), kind);
}

fn looks_prefixed(key: &[u8]) -> bool {
    let Some(colon) = key.iter().position(|byte| *byte == b':') else { return false };
    let head = &key[..colon];
    if matches!(head, b"resource" | b"span" | b"scope") {
        return true;
    }
    let number = head.strip_prefix(b"event.").or_else(|| head.strip_prefix(b"link."));
    number.is_some_and(|digits| !digits.is_empty() && digits.iter().all(u8::is_ascii_digit))
}
