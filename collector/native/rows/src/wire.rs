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
        let tag = self.tag()?;
        if tag >> 3 == 0 {
            return Err(Malformed);
        }
        Ok((tag >> 3, self.content(tag)?))
    }

    fn tag(&mut self) -> Result<u32, Malformed> {
        u32::try_from(self.varint(5)?).map_err(|_| Malformed)
    }

    fn content(&mut self, tag: u32) -> Result<Content<'a>, Malformed> {
        Ok(match tag & 7 {
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
        })
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

    /// Skips the fields up to the end of group `number`; groups are in no schema of OTLP. Within them upb allows the field number 0, too.
    fn skip_group(&mut self, number: u32) -> Result<(), Malformed> {
        let mut open = vec![number];
        while let Some(innermost) = open.last() {
            if open.len() as u32 + self.depth > MAX_DEPTH {
                return Err(Malformed);
            }
            let tag = self.tag()?;
            match tag & 7 {
                3 => open.push(tag >> 3),
                4 if tag >> 3 == *innermost => {
                    open.pop();
                }
                _ => {
                    self.content(tag)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn all(message: &[u8], depth: u32) -> Result<Vec<(u32, Content<'_>)>, Malformed> {
        fields(message, depth).collect()
    }

    #[test]
    fn numbers_may_be_longer_than_needed_and_tags_not() {
        assert_eq!(all(b"\x08\x81\x80\x80\x80\x80\x80\x80\x80\x80\x00", 0), Ok(vec![(1, Content::Varint(1))]));
        assert_eq!(all(b"\x08\x81\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00", 0), Err(Malformed));
        assert_eq!(all(b"\x88\x80\x80\x80\x80\x00\x01", 0), Err(Malformed));
        assert_eq!(all(b"\x00\x01", 0), Err(Malformed));
    }

    #[test]
    fn groups_are_skipped_as_deep_as_messages_may_be() {
        assert_eq!(all(b"\x0b\x08\x01\x0c\x10\x02", 0), Ok(vec![(1, Content::Group), (2, Content::Varint(2))]));
        assert_eq!(all(b"\x0b\x14", 0), Err(Malformed));
        assert_eq!(all(b"\x0b", 0), Err(Malformed));
        assert_eq!(all(b"\x0b\x00\x01\x0c", 0), Ok(vec![(1, Content::Group)]));
        let nested = [[0x0b; 100], [0x0c; 100]].concat();
        assert!(all(&nested, 0).is_ok());
        assert_eq!(all(&nested, 1), Err(Malformed));
    }

    #[test]
    fn usual_numbers_are_read_as_any_others() {
        let list = b"\x0a\x03\x18\x80\x01\x0a\x09\x21\x00\x00\x00\x00\x00\x00\xf8\x3f\x0a\x02\x08\x01";
        assert_eq!(plain_numbers(list), (2, 16));
        assert_eq!(plain_value(&list[..5]), Content::Varint(128));
        assert_eq!(plain_value(&list[5..16]), Content::Fixed64(1.5f64.to_bits()));
        assert_eq!(plain_number(b"\x0a\x02\x18\x80"), None);
        assert_eq!(plain_number(b"\x0a\x03\x18\x01\x01"), None);
    }
}
