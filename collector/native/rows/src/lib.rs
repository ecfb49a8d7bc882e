//! OTLP requests, from bytes to rows in ClickHouse's Native format.
//!
//! `scan` checks a request and reads what identification needs; `Rows` builds the rows of a batch. What the rows are is specified
//! in Python, in collector/decode.py and values.py, and tests hold this crate to it, value for value.

#![forbid(unsafe_code)]

pub mod attributes;
pub mod block;
pub mod check;
pub mod config;
pub mod logs;
pub mod rows;
pub mod scan;
pub mod traces;
pub mod value;
pub mod wire;
