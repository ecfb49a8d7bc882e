//! Reads changed requests, and makes rows of them, for so many seconds: `make fuzz-native`, or `cargo run --example fuzz -- SEEDS SECONDS [SEED]`.
//! SEEDS has a request a line, `traces|logs HEX`, as `python -m tests.fuzz.core --seeds` writes them. Ends with the request in hexadecimal where
//! the crate panics, or holds more memory than MOST times the request and FEW.
//!
//! The crate forbids unsafe code, so that coverage-guided fuzzing for broken memory (cargo-fuzz needs a nightly Rust) has little to find here:
//! panics, overflows and memory are what a request can still do. The address sanitizer watches what the crate is made with, the standard library
//! and aho-corasick among it; Rust's own, of which a stable compiler has the runtime but not the right to the flag (RUSTC_BOOTSTRAP).

use std::alloc::{GlobalAlloc, Layout, System};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use aho_corasick::AhoCorasick;
use rows::block::Refused;
use rows::config::{Keys, Names};
use rows::rows::Rows;
use rows::scan::{Limits, Scan, Signal};
use rows::traces::Given;

/// Bytes of memory that a byte of a request may take: an empty item of two bytes has six numbers and slices, and a row of 34 columns.
const MOST: usize = 256;
const FEW: usize = 1 << 16;

/// Counts what is allocated.
struct Counting;
static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(HELD.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A small generator of random numbers (xorshift).
struct Chance(u64);

impl Chance {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end.max(1) as u64) as usize
    }
}

fn names() -> Names {
    let text = |text: &str| text.as_bytes().to_vec();
    Names {
        ids: ["agentlightning.rollout_id", "agentlightning.attempt_id", "agentlightning.span_sequence_id"].map(text),
        attempt: text("agentlightning.attempt"),
        seal: text("agentlightning.seal"),
        tokens: ["prompt_token_ids", "response_token_ids", "response_logprobs"].map(|name| text(&format!("agentlightning.llm.{name}"))),
        facts: Keys::new([text("k")]),
        fact_prefix: text("agentlightning."),
        messages: text("gen_ai.input.messages"),
        media: AhoCorasick::new(["image", "audio"]).expect("two words"),
        service: text("service.name"),
    }
}

fn mutate(request: &mut Vec<u8>, others: &[(Signal, Vec<u8>)], chance: &mut Chance) {
    for _ in 0..=chance.below(4) {
        let at = chance.below(request.len() + 1);
        let end = (at + 1 + chance.below(12)).min(request.len());
        match chance.below(6) {
            0 => drop(request.drain(at..end)),
            1 if at < request.len() => request[at] ^= 1 << chance.below(8),
            2 if at < request.len() => request[at] = chance.below(256) as u8,
            3 => {
                let copied = request[at..end].to_vec();
                drop(request.splice(at..at, copied));
            }
            4 => {
                let other = &others[chance.below(others.len())].1;
                let start = chance.below(other.len());
                let piece = other[start..(start + chance.below(200)).min(other.len())].to_vec();
                drop(request.splice(at..at, piece));
            }
            _ => request.truncate(at),
        }
    }
}

/// Reads a request and makes its rows; returns the number of items.
fn read(signal: Signal, request: &[u8], names: &Names) -> usize {
    let limits = Limits { earliest: 946_684_800_000_000_000, latest: u64::MAX, attributes: 3, tokens: 2 };
    let Ok(scan) = Scan::read(signal, request, &limits, names) else { return 0 };
    let items = scan.groups.iter().sum();
    let numbers: Vec<u64> = (0..items as u64).collect();
    let given = Given { runs: &[(items, Some(("ro", "at")))], numbers: &numbers, received_ms: 1, batch: 2, first: 3, takes: &|_| true };
    let mut rows = Rows::new(signal);
    if let Err(Refused::Panic(message)) = rows.add(request, &given, names) {
        panic!("{message}");
    }
    assert_eq!(rows.count(), items as u64, "what was read became rows");
    let mut pieces = rows.into_pieces();
    while pieces.next_piece().is_some() {}
    items
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let seeds = std::fs::read_to_string(arguments.next().expect("a file of seeds")).expect("the file of seeds");
    let seconds: u64 = arguments.next().map_or(60, |text| text.parse().expect("seconds"));
    let seed: u64 = arguments.next().map_or(7, |text| text.parse().expect("a seed"));
    let digits = |text: &str| (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hex")).collect();
    let corpus: Vec<(Signal, Vec<u8>)> = seeds
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(kind, hex)| (if kind == "logs" { Signal::Logs } else { Signal::Traces }, digits(hex)))
        .collect();
    let (mut chance, names) = (Chance(seed | 1), names());
    let until = Instant::now() + Duration::from_secs(seconds);
    let (mut requests, mut items, mut most) = (0u64, 0, 0);
    while Instant::now() < until {
        let (signal, mut request) = corpus[chance.below(corpus.len())].clone();
        if requests >= corpus.len() as u64 {
            mutate(&mut request, &corpus, &mut chance);
        }
        let before = HELD.load(Relaxed);
        PEAK.store(before, Relaxed);
        let done = catch_unwind(AssertUnwindSafe(|| read(signal, &request, &names)));
        let took = PEAK.load(Relaxed) - before;
        most = most.max(took);
        if done.is_err() || took > FEW + MOST * request.len() {
            let hex: String = request.iter().map(|byte| format!("{byte:02x}")).collect();
            eprintln!("seed {seed}, {took} bytes held for {hex}");
            std::process::exit(1);
        }
        items += done.unwrap_or_default();
        requests += 1;
    }
    println!("{{\"seed\": {seed}, \"requests\": {requests}, \"items\": {items}, \"most_bytes\": {most}}}");
}
