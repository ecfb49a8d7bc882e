//! Rows as columns, in ClickHouse's Native format: https://clickhouse.com/docs/interfaces/formats/Native

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::wire::Malformed;

/// A column: its name, its type, and the streams of bytes that it consists of.
pub struct Column {
    pub name: &'static str,
    pub kind: &'static str,
    pub streams: usize,
}

pub const fn column(name: &'static str, kind: &'static str, streams: usize) -> Column {
    Column { name, kind, streams }
}

/// A block that grows row by row. Streams are numbered in the order of the columns: a list has its offsets, then its items; a map its
/// offsets, its keys and its values.
pub struct Block {
    columns: &'static [Column],
    streams: Vec<Vec<u8>>,
    pub rows: u64,
}

/// Why a request gives no rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    Malformed,
    /// There are more items than identities or numbers, or fewer.
    Mismatch,
    /// A defect of this crate.
    Panic(String),
}

impl From<Malformed> for Refused {
    fn from(_: Malformed) -> Self {
        Refused::Malformed
    }
}

/// The lengths of a block, to go back to.
struct Mark {
    lengths: Vec<usize>,
    rows: u64,
}

impl Block {
    pub fn new(columns: &'static [Column]) -> Self {
        let streams = columns.iter().map(|each| each.streams).sum();
        Block { columns, streams: vec![Vec::new(); streams], rows: 0 }
    }

    /// Adds the rows that `read` makes, or none of them.
    pub fn all_or_nothing<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T, Refused>) -> Result<T, Refused> {
        let mark = self.mark();
        let made = catch_unwind(AssertUnwindSafe(|| read(self))).unwrap_or_else(|panic| Err(Refused::Panic(message_of(panic.as_ref()))));
        if made.is_err() {
            self.go_back(&mark);
        }
        made
    }

    fn mark(&self) -> Mark {
        Mark { lengths: self.streams.iter().map(Vec::len).collect(), rows: self.rows }
    }

    /// Drops what was added since.
    fn go_back(&mut self, mark: &Mark) {
        for (stream, length) in self.streams.iter_mut().zip(&mark.lengths) {
            stream.truncate(*length);
        }
        self.rows = mark.rows;
    }

    /// Appends bytes that are in the column's format already.
    pub fn append(&mut self, stream: usize, bytes: &[u8]) {
        self.streams[stream].extend_from_slice(bytes);
    }

    pub fn string(&mut self, stream: usize, text: &[u8]) {
        push_string(text, &mut self.streams[stream]);
    }

    /// Appends the hexadecimal digits of an id.
    pub fn hex(&mut self, stream: usize, id: &[u8]) {
        let stream = &mut self.streams[stream];
        push_varint(2 * id.len() as u64, stream);
        stream
            .extend(id.iter().flat_map(|byte| [b"0123456789abcdef"[usize::from(byte >> 4)], b"0123456789abcdef"[usize::from(byte & 15)]]));
    }

    /// Ends a list in the column of these offsets: it has `items` more than the ones before.
    pub fn end_list(&mut self, offsets: usize, items: u64) {
        let offsets = &mut self.streams[offsets];
        let before = offsets.last_chunk().map_or(0, |last| u64::from_le_bytes(*last));
        offsets.extend_from_slice(&(before + items).to_le_bytes());
    }

    /// The bytes of the block, in pieces; a column's memory is released when its last piece has been taken.
    pub fn into_pieces(self) -> Pieces {
        let mut head = Vec::new();
        push_varint(self.columns.len() as u64, &mut head);
        push_varint(self.rows, &mut head);
        let mut parts = vec![head];
        let mut streams = self.streams.into_iter();
        for column in self.columns {
            let mut name = Vec::new();
            push_string(column.name.as_bytes(), &mut name);
            push_string(column.kind.as_bytes(), &mut name);
            parts.push(name);
            parts.extend(streams.by_ref().take(column.streams));
        }
        Pieces { parts: parts.into_iter(), at: 0, current: Vec::new() }
    }
}

const PIECE_BYTES: usize = 1 << 20;

pub struct Pieces {
    parts: std::vec::IntoIter<Vec<u8>>,
    current: Vec<u8>,
    at: usize,
}

impl Pieces {
    /// The next piece: of one long stream, or of several short ones.
    pub fn next_piece(&mut self) -> Option<Vec<u8>> {
        let mut piece = Vec::new();
        while piece.len() < PIECE_BYTES {
            if self.at == self.current.len() {
                let Some(next) = self.parts.next() else { break };
                (self.current, self.at) = (next, 0);
            }
            let size = (PIECE_BYTES - piece.len()).min(self.current.len() - self.at);
            piece.extend_from_slice(&self.current[self.at..self.at + size]);
            self.at += size;
        }
        (!piece.is_empty()).then_some(piece)
    }
}

pub fn push_varint(mut number: u64, bytes: &mut Vec<u8>) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

pub fn push_string(text: &[u8], bytes: &mut Vec<u8>) {
    push_varint(text.len() as u64, bytes);
    bytes.extend_from_slice(text);
}

/// What a panic says.
pub fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a message").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    static COLUMNS: [Column; 2] = [column("a", "String", 1), column("b", "Array(UInt64)", 2)];

    fn add(block: &mut Block, text: &[u8], numbers: &[u64]) {
        block.string(0, text);
        for number in numbers {
            block.append(2, &number.to_le_bytes());
        }
        block.end_list(1, numbers.len() as u64);
        block.rows += 1;
    }

    fn bytes(block: Block) -> Vec<u8> {
        let mut pieces = block.into_pieces();
        std::iter::from_fn(|| pieces.next_piece()).flatten().collect()
    }

    #[test]
    fn what_fails_or_panics_adds_nothing() {
        let mut block = Block::new(&COLUMNS);
        add(&mut block, b"x", &[1]);
        let refused = block.all_or_nothing(|block| {
            add(block, b"half", &[2, 3]);
            block.string(0, b"a row");
            Err::<(), _>(Refused::Mismatch)
        });
        assert_eq!(refused, Err(Refused::Mismatch));
        let panicked = block.all_or_nothing(|block| -> Result<(), Refused> {
            block.string(0, b"a row");
            panic!("a defect")
        });
        assert_eq!(panicked, Err(Refused::Panic("a defect".into())));
        add(&mut block, b"y", &[4]);
        let mut expected = Block::new(&COLUMNS);
        add(&mut expected, b"x", &[1]);
        add(&mut expected, b"y", &[4]);
        assert_eq!(bytes(block), bytes(expected));
    }
}
