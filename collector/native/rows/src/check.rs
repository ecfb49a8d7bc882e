//! Checks that bytes are a message of OTLP, and counts what it consists of.

use crate::wire::{Content, MAX_DEPTH, Malformed, fields, plain_numbers};

#[derive(Clone, Copy)]
pub enum Kind {
    Text,
    Message(&'static Schema),
}

/// The fields of a message that are texts or messages; any bytes and numbers are allowed in the others.
pub struct Schema {
    fields: &'static [(u32, Kind)],
    is_list: bool,
}

const fn message(fields: &'static [(u32, Kind)]) -> Schema {
    Schema { fields, is_list: false }
}

use Kind::{Message, Text};

pub static ANY_VALUE: Schema = message(&[(1, Text), (5, Message(&ARRAY_VALUE)), (6, Message(&KEY_VALUE_LIST))]);
static ARRAY_VALUE: Schema = Schema { fields: &[(1, Message(&ANY_VALUE))], is_list: true };
static KEY_VALUE_LIST: Schema = message(&[(1, Message(&KEY_VALUE))]);
pub static KEY_VALUE: Schema = message(&[(1, Text), (2, Message(&ANY_VALUE))]);
static ENTITY_REF: Schema = message(&[(1, Text), (2, Text), (3, Text), (4, Text)]);
pub static RESOURCE: Schema = message(&[(1, Message(&KEY_VALUE)), (3, Message(&ENTITY_REF))]);
pub static SCOPE: Schema = message(&[(1, Text), (2, Text), (3, Message(&KEY_VALUE))]);
pub static EVENT: Schema = message(&[(2, Text), (3, Message(&KEY_VALUE))]);
pub static LINK: Schema = message(&[(3, Text), (4, Message(&KEY_VALUE))]);
pub static STATUS: Schema = message(&[(2, Text)]);

/// What a request consists of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Resources, scopes and items.
    pub parts: u64,
    /// Other fields of the messages that contain them.
    pub others: u64,
    /// Messages, parts included, outside of lists.
    pub messages: u64,
    /// Values in lists, and all messages below them.
    pub values: u64,
}

/// Checks a message that is nested in `depth` others.
pub fn check(schema: &Schema, bytes: &[u8], depth: u32, in_list: bool, counts: &mut Counts) -> Result<(), Malformed> {
    if depth > MAX_DEPTH {
        return Err(Malformed);
    }
    *(if in_list { &mut counts.values } else { &mut counts.messages }) += 1;
    let (plain, start) = if schema.is_list && depth < MAX_DEPTH { plain_numbers(bytes) } else { (0, 0) };
    counts.values += plain;
    for field in fields(&bytes[start..], depth) {
        let (number, Content::Bytes(content)) = field? else { continue };
        match schema.fields.iter().find(|(each, _)| *each == number) {
            Some((_, Text)) => check_text(content)?,
            Some((_, Message(inner))) => check(inner, content, depth + 1, in_list || schema.is_list, counts)?,
            None => {}
        }
    }
    Ok(())
}

pub fn check_text(bytes: &[u8]) -> Result<(), Malformed> {
    std::str::from_utf8(bytes).map(|_| ()).map_err(|_| Malformed)
}
