//! Attribute values as texts, and their types: collector/values.py says how.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::wire::{Content, MAX_DEPTH, Malformed, fields, plain_number, plain_value};

/// A value of OTLP. The items of a list or the pairs of an object are read when they are written, so that a value takes no memory.
#[derive(Clone, Debug, Default)]
pub enum Value<'a> {
    #[default]
    Empty,
    Text(&'a [u8]),
    Bool(bool),
    Int(i64),
    Double(f64),
    List(Pieces<'a>),
    Object(Pieces<'a>),
    Bytes(&'a [u8]),
}

/// A message that may be given in several pieces, which protobuf merges.
pub type Pieces<'a> = Vec<&'a [u8]>;

impl<'a> Value<'a> {
    /// Merges the fields of an AnyValue into this value: of the kinds of value the last one counts, and equal messages are merged.
    pub fn merge(&mut self, any_value: &'a [u8], depth: u32) -> Result<(), Malformed> {
        for field in fields(any_value, depth) {
            match field? {
                (1, Content::Bytes(text)) => *self = Value::Text(text),
                (2, Content::Varint(bit)) => *self = Value::Bool(bit != 0),
                (3, Content::Varint(number)) => *self = Value::Int(number as i64),
                (4, Content::Fixed64(bits)) => *self = Value::Double(f64::from_bits(bits)),
                (5, Content::Bytes(list)) => match self {
                    Value::List(pieces) => pieces.push(list),
                    _ => *self = Value::List(vec![list]),
                },
                (6, Content::Bytes(object)) => match self {
                    Value::Object(pieces) => pieces.push(object),
                    _ => *self = Value::Object(vec![object]),
                },
                (7, Content::Bytes(bytes)) => *self = Value::Bytes(bytes),
                (8, Content::Varint(_)) => *self = Value::Empty, // an index into a table of texts that this signal does not have
                _ => {}
            }
        }
        Ok(())
    }
}

/// A key and its value.
#[derive(Clone, Debug, Default)]
pub struct Pair<'a> {
    pub key: &'a [u8],
    pub value: Value<'a>,
}

impl<'a> Pair<'a> {
    /// Reads a KeyValue that is nested in `depth` messages.
    pub fn read(key_value: &'a [u8], depth: u32) -> Result<Self, Malformed> {
        let mut pair = Pair::default();
        for field in fields(key_value, depth) {
            match field? {
                (1, Content::Bytes(key)) => pair.key = key,
                (2, Content::Bytes(value)) => pair.value.merge(value, depth + 1)?,
                _ => {}
            }
        }
        Ok(pair)
    }
}

/// Calls `each` with the items of a list.
pub fn each_item<'a>(pieces: &[&'a [u8]], depth: u32, mut each: impl FnMut(Value<'a>) -> Result<(), Malformed>) -> Result<(), Malformed> {
    for piece in pieces {
        let mut rest = *piece;
        while let Some(size) = plain_number(rest) {
            each(match plain_value(&rest[..size]) {
                Content::Fixed64(bits) => Value::Double(f64::from_bits(bits)),
                Content::Varint(number) => Value::Int(number as i64),
                _ => Value::Empty,
            })?;
            rest = &rest[size..];
        }
        for field in fields(rest, depth) {
            if let (1, Content::Bytes(item)) = field? {
                let mut value = Value::Empty;
                value.merge(item, depth + 1)?;
                each(value)?;
            }
        }
    }
    Ok(())
}

/// Reads a list of ints from 0 to 2**32 - 1 into `numbers`, little endian; returns false for anything else.
pub fn read_ids(value: &Value, depth: u32, numbers: &mut Vec<u8>) -> Result<bool, Malformed> {
    let Value::List(pieces) = value else { return Ok(false) };
    let mut fits = true;
    each_item(pieces, depth + 1, |item| {
        match item {
            Value::Int(number) if u32::try_from(number).is_ok() => numbers.extend_from_slice(&(number as u32).to_le_bytes()),
            _ => fits = false,
        }
        Ok(())
    })?;
    Ok(fits)
}

/// How a list of doubles fits into a list of float32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    Exact,
    /// All are finite, and were rounded.
    Nearest,
    /// It is no such list, or not all of its numbers are finite as float32.
    No,
}

/// Reads a list of doubles into `numbers` as float32, little endian.
pub fn read_floats(value: &Value, depth: u32, numbers: &mut Vec<u8>) -> Result<Fit, Malformed> {
    let Value::List(pieces) = value else { return Ok(Fit::No) };
    let mut fit = Fit::Exact;
    each_item(pieces, depth + 1, |item| {
        match item {
            Value::Double(number) if (number as f32).is_finite() => {
                let small = number as f32;
                numbers.extend_from_slice(&small.to_le_bytes());
                if f64::from(small) != number && fit == Fit::Exact {
                    fit = Fit::Nearest;
                }
            }
            _ => fit = Fit::No,
        }
        Ok(())
    })?;
    Ok(fit)
}

/// Writes the text of a value to `text`, and returns its type; None for a string. Repeated keys, of which the first counts, are added to
/// `repeated`. `depth`: how many messages the value is nested in.
pub fn write_text(value: &Value, depth: u32, text: &mut Vec<u8>, repeated: &mut u64) -> Result<Option<Type>, Malformed> {
    let name = match value {
        Value::Text(own) => {
            text.extend_from_slice(own);
            return Ok(None);
        }
        Value::Empty => "empty",
        Value::Bool(bit) => {
            text.extend_from_slice(if *bit { b"true" } else { b"false" });
            "bool"
        }
        Value::Int(number) => {
            write_int(*number, text);
            "int"
        }
        Value::Double(number) => {
            write_double(*number, text);
            "double"
        }
        Value::Bytes(bytes) => {
            write_base64(bytes, text);
            "bytes"
        }
        Value::List(_) => return Json::write(value, depth, "array", text, repeated).map(Some),
        Value::Object(_) => return Json::write(value, depth, "kvlist", text, repeated).map(Some),
    };
    Ok(Some(Type { name, letters: Vec::new() }))
}

/// The type of a value that is no string, as in AttrTypes: `array:id`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Type {
    pub name: &'static str,
    /// A letter for each number and string of an ambiguous text; empty for any other.
    pub letters: Vec<u8>,
}

impl Type {
    pub fn text(&self) -> Vec<u8> {
        let mut text = self.name.as_bytes().to_vec();
        if !self.letters.is_empty() {
            text.push(b':');
            text.extend_from_slice(&self.letters);
        }
        text
    }
}

/// Writes a list or an object.
struct Json<'t> {
    text: &'t mut Vec<u8>,
    repeated: &'t mut u64,
    letters: Vec<u8>,
    unambiguous: bool,
}

impl Json<'_> {
    fn write(value: &Value, depth: u32, name: &'static str, text: &mut Vec<u8>, repeated: &mut u64) -> Result<Type, Malformed> {
        let mut json = Json { text, repeated, letters: Vec::new(), unambiguous: true };
        json.value(value, depth)?;
        let Json { mut letters, unambiguous, .. } = json;
        if unambiguous {
            letters.clear();
        } else if let Some(last) = letters.last().copied() {
            while letters.last() == Some(&last) {
                letters.pop();
            }
            letters.push(last);
        }
        Ok(Type { name, letters })
    }

    fn value(&mut self, value: &Value, depth: u32) -> Result<(), Malformed> {
        match value {
            Value::List(_) | Value::Object(_) if depth >= MAX_DEPTH => return Err(Malformed),
            Value::Empty => self.text.extend_from_slice(b"null"),
            Value::Bool(bit) => self.text.extend_from_slice(if *bit { b"true" } else { b"false" }),
            Value::Text(text) => {
                self.letters.push(b's');
                write_json_string(text, self.text);
            }
            Value::Int(number) => {
                self.letters.push(b'i');
                write_int(*number, self.text);
            }
            Value::Double(number) => self.double(*number),
            Value::Bytes(bytes) => {
                self.letters.push(b'y');
                self.unambiguous = false;
                self.text.push(b'"');
                write_base64(bytes, self.text);
                self.text.push(b'"');
            }
            Value::List(pieces) => {
                self.text.push(b'[');
                let start = self.text.len();
                each_item(pieces, depth + 1, |item| {
                    if self.text.len() > start {
                        self.text.push(b',');
                    }
                    self.value(&item, depth + 2)
                })?;
                self.text.push(b']');
            }
            Value::Object(pieces) => self.object(pieces, depth)?,
        }
        Ok(())
    }

    fn double(&mut self, number: f64) {
        self.letters.push(b'd');
        if !number.is_finite() {
            self.unambiguous = false;
            self.text.push(b'"');
            write_double(number, self.text);
            self.text.push(b'"');
            return;
        }
        let start = self.text.len();
        write_double(number, self.text);
        self.unambiguous &= self.text[start..].iter().any(|byte| matches!(byte, b'.' | b'e'));
    }

    fn object(&mut self, pieces: &[&[u8]], depth: u32) -> Result<(), Malformed> {
        let mut pairs: Vec<Pair> = Vec::new();
        for piece in pieces {
            for field in fields(piece, depth + 1) {
                if let (1, Content::Bytes(key_value)) = field? {
                    pairs.push(Pair::read(key_value, depth + 2)?);
                }
            }
        }
        let before = pairs.len();
        pairs.sort_by(|one, other| one.key.cmp(other.key)); // stable: the first of equal keys stays the first
        pairs.dedup_by(|one, before| one.key == before.key);
        *self.repeated += (before - pairs.len()) as u64;
        self.text.push(b'{');
        for (index, pair) in pairs.iter().enumerate() {
            if index > 0 {
                self.text.push(b',');
            }
            write_json_string(pair.key, self.text);
            self.text.push(b':');
            self.value(&pair.value, depth + 3)?;
        }
        self.text.push(b'}');
        Ok(())
    }
}

pub fn write_int(number: i64, text: &mut Vec<u8>) {
    text.extend_from_slice(number.to_string().as_bytes());
}

fn write_base64(bytes: &[u8], text: &mut Vec<u8>) {
    text.extend_from_slice(STANDARD.encode(bytes).as_bytes());
}

/// Writes the shortest text that parses back to `number`, with an exponent below 1e-6 and from 1e21 on, as Go's encoding/json does.
pub fn write_double(number: f64, text: &mut Vec<u8>) {
    if !number.is_finite() {
        let name: &[u8] = if number.is_nan() {
            b"NaN"
        } else if number > 0.0 {
            b"Infinity"
        } else {
            b"-Infinity"
        };
        text.extend_from_slice(name);
        return;
    }
    // Where two texts are equally short and near, ryu takes the even one, like Go and Python; the standard library does not.
    let mut buffer = ryu::Buffer::new();
    let shortest = buffer.format_finite(number);
    let unsigned = shortest.strip_prefix('-').unwrap_or(shortest);
    if unsigned.len() < shortest.len() {
        text.push(b'-');
    }
    let (mantissa, exponent) = unsigned.split_once('e').unwrap_or((unsigned, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let all = [whole, fraction].concat();
    let digits = all.trim_start_matches('0');
    let zeros = all.len() - digits.len();
    let digits = digits.trim_end_matches('0').as_bytes();
    if digits.is_empty() {
        text.push(b'0');
        return;
    }
    let power = exponent.parse::<i32>().unwrap_or(0) + whole.len() as i32 - zeros as i32 - 1;
    if !(-6..21).contains(&power) {
        text.push(digits[0]);
        if digits.len() > 1 {
            text.push(b'.');
            text.extend_from_slice(&digits[1..]);
        }
        text.extend_from_slice(if power < 0 { b"e-" } else { b"e+" });
        text.extend_from_slice(power.unsigned_abs().to_string().as_bytes());
        return;
    }
    if power < 0 {
        text.extend_from_slice(b"0.");
        text.resize(text.len() + (-power - 1) as usize, b'0');
        text.extend_from_slice(digits);
        return;
    }
    let whole = power as usize + 1;
    if digits.len() <= whole {
        text.extend_from_slice(digits);
        text.resize(text.len() + whole - digits.len(), b'0');
    } else {
        text.extend_from_slice(&digits[..whole]);
        text.push(b'.');
        text.extend_from_slice(&digits[whole..]);
    }
}

/// Writes a string like Go's encoding/json without HTML escaping.
pub fn write_json_string(string: &[u8], text: &mut Vec<u8>) {
    text.push(b'"');
    let mut start = 0;
    for (at, byte) in string.iter().enumerate() {
        let escape: &[u8] = match byte {
            b'"' => b"\\\"",
            b'\\' => b"\\\\",
            0x08 => b"\\b",
            0x0c => b"\\f",
            b'\n' => b"\\n",
            b'\r' => b"\\r",
            b'\t' => b"\\t",
            0x00..0x20 => &[b'\\', b'u', b'0', b'0', b'0' + (byte >> 4), b"0123456789abcdef"[usize::from(byte & 15)]],
            0xe2 if string[at..].starts_with(&[0xe2, 0x80, 0xa8]) => b"\\u2028",
            0xe2 if string[at..].starts_with(&[0xe2, 0x80, 0xa9]) => b"\\u2029",
            _ => continue,
        };
        text.extend_from_slice(&string[start..at]);
        text.extend_from_slice(escape);
        start = at + if *byte == 0xe2 { 3 } else { 1 };
    }
    text.extend_from_slice(&string[start..]);
    text.push(b'"');
}
