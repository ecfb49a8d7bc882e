//! Protobuf's wire format, as strict as the parser of the reference (upb).

pub const MAX_DEPTH: u32 = 100;

/// The bytes are not what their schema says: cut off, no UTF-8, or nested too deep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Content<'a> {
    Varint(u64),
    Fixed64(u64),
    Bytes(&'a [u8]),
    Fixed32(u32),
    Group,
}

/// Iterates over the fields of a message: (number, content). Ends after the first error.
pub struct Fields<'a> {
    rest: &'a [u8],
    depth: u32,
}

/// `depth`: how many messages this one is nested in.
pub fn fields(message: &[u8], depth: u32) -> Fields<'_> {
    Fields { rest: message, depth }
}

impl<'a> Fields<'a> {
    fn next_field(&mut self) -> Result<(u32, Content<'a>), Malformed> {
        let tag = self.varint(5)?;
        let tag = u32::try_from(tag).map_err(|_| Malformed)?;
        if tag >> 3 == 0 {
            return Err(Malformed);
        }
        let content = match tag & 7 {
            0 => Content::Varint(self.varint(10)?),
            1 => Content::Fixed64(u64::from_le_bytes(self.take(8)?.try_into().map_err(|_| Malformed)?)),
            2 => {
                let size = self.varint(5)?;
                if size > i32::MAX as u64 {
                    return Err(Malformed);
                }
                Content::Bytes(self.take(size as usize)?)
            }
            3 => {
                self.skip_group(tag >> 3)?;
                Content::Group
            }
            5 => Content::Fixed32(u32::from_le_bytes(self.take(4)?.try_into().map_err(|_| Malformed)?)),
            _ => return Err(Malformed), // the end of a group that did not begin, or no wire type at all
        };
        Ok((tag >> 3, content))
    }

    fn varint(&mut self, most: usize) -> Result<u64, Malformed> {
        let mut value = 0u64;
        for (place, byte) in self.rest.iter().take(most).enumerate() {
            value |= u64::from(byte & 0x7f).checked_shl(7 * place as u32).unwrap_or(0);
            if *byte < 0x80 {
                self.rest = &self.rest[place + 1..];
                return Ok(value);
            }
        }
        Err(Malformed)
    }

    fn take(&mut self, size: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.rest.split_at_checked(size).ok_or(Malformed)?;
        self.rest = rest;
        Ok(taken)
    }

    /// Skips the fields up to the end of group `number`; groups are in no schema of OTLP.
    fn skip_group(&mut self, number: u32) -> Result<(), Malformed> {
        let mut open = vec![number];
        while let Some(innermost) = open.last() {
            if open.len() as u32 + self.depth > MAX_DEPTH {
                return Err(Malformed);
            }
            let before = self.rest;
            let tag = u32::try_from(self.varint(5)?).map_err(|_| Malformed)?;
            match tag & 7 {
                3 if tag >> 3 != 0 => open.push(tag >> 3),
                4 if tag >> 3 == *innermost => {
                    open.pop();
                }
                _ => {
                    self.rest = before;
                    self.next_field()?;
                }
            }
        }
        Ok(())
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u32, Content<'a>), Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let found = self.next_field();
        if found.is_err() {
            self.rest = &[];
        }
        Some(found)
    }
}

/// Returns the number of items at the start of an ArrayValue that are written in the usual way, `0a LENGTH 18 VARINT` or `0a 09 21 DOUBLE`,
/// and how many bytes they take: long lists of token ids and log-probs consist of nothing else.
pub fn plain_numbers(list: &[u8]) -> (u64, usize) {
    let (mut count, mut at) = (0, 0);
    while let Some(size) = plain_number(&list[at..]) {
        count += 1;
        at += size;
    }
    (count, at)
}

/// Returns the size of such an item, if the list starts with one.
pub fn plain_number(list: &[u8]) -> Option<usize> {
    let [0x0a, size, kind, rest @ ..] = list else { return None };
    let length = usize::from(*size).checked_sub(1)?;
    let number = rest.get(..length)?;
    let (last, before) = number.split_last()?;
    match kind {
        0x18 if length <= 10 && *last < 0x80 && before.iter().all(|byte| *byte >= 0x80) => Some(length + 3),
        0x21 if length == 8 => Some(11),
        _ => None,
    }
}

/// Reads the number of an item found by `plain_number`: an int, or the bits of a double.
pub fn plain_value(item: &[u8]) -> Content<'static> {
    if item[2] == 0x21 {
        return Content::Fixed64(item[3..].iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte)));
    }
    let places = item[3..].iter().enumerate();
    Content::Varint(places.fold(0, |value, (place, byte)| value | u64::from(byte & 0x7f).checked_shl(7 * place as u32).unwrap_or(0)))
}
