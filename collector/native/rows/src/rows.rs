//! The rows of a batch in one table.

use crate::block::{Block, Pieces, Refused};
use crate::config::Names;
use crate::scan::Signal;
use crate::traces::Given;
use crate::{logs, traces};

pub struct Rows {
    signal: Signal,
    block: Block,
    /// Repeated attribute keys, which were dropped.
    pub repeated: u64,
}

impl Rows {
    pub fn new(signal: Signal) -> Self {
        let columns: &[_] = match signal {
            Signal::Traces => &traces::COLUMNS,
            Signal::Logs => &logs::COLUMNS,
        };
        Rows { signal, block: Block::new(columns), repeated: 0 }
    }

    pub fn count(&self) -> u64 {
        self.block.rows
    }

    /// Adds the rows of a request, or nothing of it.
    pub fn add(&mut self, request: &[u8], given: &Given, names: &Names) -> Result<(), Refused> {
        let add = match self.signal {
            Signal::Traces => traces::add,
            Signal::Logs => logs::add,
        };
        self.repeated += self.block.all_or_nothing(|block| add(block, request, given, names))?;
        Ok(())
    }

    pub fn into_pieces(self) -> Pieces {
        self.block.into_pieces()
    }
}
