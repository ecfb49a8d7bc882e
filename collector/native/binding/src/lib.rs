//! The Python module `agl_otel.collector._native`. It takes bytes and nothing mutable, reads large requests without the GIL, and turns a panic into an error.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use aho_corasick::AhoCorasick;
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use rows::block::{Pieces, Refused, message_of};
use rows::config::{Keys, Names};
use rows::scan::{Defect, Limits, Scan, Signal};
use rows::traces::Given;
use rows::wire::Malformed;

create_exception!(_native, MalformedError, PyValueError, "The bytes are no such request.");
create_exception!(_native, PanicError, PyRuntimeError, "A defect of this module; the request is not to blame, but cannot be read.");

/// Size in bytes of requests that are read without the GIL: giving it up and taking it again costs more than reading a smaller one.
const LARGE: usize = 64 << 10;

/// Runs `work` on a request of `size` bytes, without the GIL if it is large.
fn guarded<T: Send>(py: Python<'_>, size: usize, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    let work = || catch_unwind(AssertUnwindSafe(work));
    let done = if size < LARGE { work() } else { py.detach(work) };
    done.map_err(|panic| panicked(&message_of(panic.as_ref())))
}

fn panicked(message: &str) -> PyErr {
    PanicError::new_err(format!("a defect of the compiled core: {message}"))
}

fn malformed(_: Malformed) -> PyErr {
    MalformedError::new_err("a field is cut off, a text is no UTF-8, or messages are nested too deep")
}

fn signal_of(name: &str) -> Signal {
    if name == "logs" { Signal::Logs } else { Signal::Traces }
}

/// The compiled core with the names that rows depend on.
#[pyclass(frozen)]
struct Core {
    names: Arc<Names>,
}

#[pymethods]
impl Core {
    #[new]
    #[pyo3(signature = (*, ids, attempt, seal, tokens, facts, fact_prefix, messages, media, service))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        ids: [String; 3],
        attempt: String,
        seal: String,
        tokens: [String; 3],
        facts: Vec<String>,
        fact_prefix: String,
        messages: String,
        media: Vec<String>,
        service: String,
    ) -> PyResult<Self> {
        let names = Names {
            ids: ids.map(String::into_bytes),
            attempt: attempt.into_bytes(),
            seal: seal.into_bytes(),
            tokens: tokens.map(String::into_bytes),
            facts: Keys::new(facts.into_iter().map(String::into_bytes)),
            fact_prefix: fact_prefix.into_bytes(),
            messages: messages.into_bytes(),
            media: AhoCorasick::new(media).map_err(|error| PyValueError::new_err(error.to_string()))?,
            service: service.into_bytes(),
        };
        Ok(Core { names: Arc::new(names) })
    }

    /// Checks a request. Raises MalformedError, PanicError.
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (signal, raw, *, earliest, latest, max_attributes, max_tokens))]
    fn scan(
        &self,
        py: Python<'_>,
        signal: &str,
        raw: &Bound<'_, PyBytes>,
        earliest: u64,
        latest: u64,
        max_attributes: usize,
        max_tokens: usize,
    ) -> PyResult<Scanned> {
        let signal = signal_of(signal);
        let limits = Limits { earliest, latest, attributes: max_attributes, tokens: max_tokens };
        let bytes = raw.as_bytes();
        let scan = guarded(py, bytes.len(), || Scan::read(signal, bytes, &limits, &self.names))?.map_err(malformed)?;
        Scanned::new(py, scan)
    }

    /// Starts the rows of a batch.
    fn rows(&self, signal: &str) -> Rows {
        Rows { names: self.names.clone(), rows: Some(rows::rows::Rows::new(signal_of(signal))) }
    }
}

/// What `Core.scan` found.
#[pyclass(frozen, get_all)]
struct Scanned {
    parts: u64,
    others: u64,
    messages: u64,
    values: u64,
    expanded: u64,
    resources: Py<PyList>,
    groups: Vec<usize>,
    own: Py<PyList>,
    trace_ids: Py<PyList>,
    span_ids: Py<PyList>,
    parent_ids: Py<PyList>,
    defects: Vec<(usize, &'static str)>,
    opening: Vec<usize>,
    silent: Vec<usize>,
}

impl Scanned {
    fn new(py: Python<'_>, scan: Scan<'_>) -> PyResult<Self> {
        let ids = |ids: &[&[u8]]| PyList::new(py, ids.iter().map(|id| PyBytes::new(py, id))).map(Bound::unbind);
        let own = scan.own.iter().map(|(count, ids)| (*count, PyBytes::new(py, ids)));
        Ok(Scanned {
            parts: scan.counts.parts,
            others: scan.counts.others,
            messages: scan.counts.messages,
            values: scan.counts.values,
            expanded: scan.expanded,
            resources: PyList::new(py, scan.resources.iter().map(|ids| PyBytes::new(py, ids)))?.unbind(),
            groups: scan.groups,
            own: PyList::new(py, own.collect::<Vec<_>>())?.unbind(),
            trace_ids: ids(&scan.trace_ids)?,
            span_ids: ids(&scan.span_ids)?,
            parent_ids: ids(&scan.parent_ids)?,
            defects: scan.defects.iter().map(|(index, defect)| (*index, name_of(*defect))).collect(),
            opening: scan.opening,
            silent: scan.silent,
        })
    }
}

fn name_of(defect: Defect) -> &'static str {
    match defect {
        Defect::TraceId => "trace_id",
        Defect::SpanId => "span_id",
        Defect::ParentId => "parent_id",
        Defect::Timestamp => "timestamp",
        Defect::Attributes => "attributes",
        Defect::Tokens => "tokens",
    }
}

/// The rows of a batch. Used by one thread at a time.
#[pyclass]
struct Rows {
    names: Arc<Names>,
    rows: Option<rows::rows::Rows>,
}

#[pymethods]
impl Rows {
    /// Adds the rows of a request, or nothing of it. Raises MalformedError, PanicError, and ValueError if the numbers of items, identities and
    /// numbers disagree.
    ///
    /// `runs`: of so many items in a row, (rollout id, attempt id) or None if they are refused. `numbers`: of each other item. `only`: the
    /// positions in the batch to add; all if None.
    #[pyo3(signature = (raw, runs, numbers, *, received_ms, batch, first, only=None))]
    #[allow(clippy::too_many_arguments)]
    fn add(
        &mut self,
        py: Python<'_>,
        raw: &Bound<'_, PyBytes>,
        runs: Vec<(usize, Option<(String, String)>)>,
        numbers: Vec<u64>,
        received_ms: i64,
        batch: u64,
        first: u32,
        only: Option<HashSet<u32>>,
    ) -> PyResult<()> {
        let bytes = raw.as_bytes();
        let names = &self.names;
        let rows = self.rows.as_mut().ok_or_else(|| PyValueError::new_err("the rows have been taken"))?;
        let added = guarded(py, bytes.len(), || {
            let runs: Vec<_> =
                runs.iter().map(|(count, ids)| (*count, ids.as_ref().map(|(one, two)| (one.as_str(), two.as_str())))).collect();
            let takes = |position: u32| only.as_ref().is_none_or(|only| only.contains(&position));
            let given = Given { runs: &runs, numbers: &numbers, received_ms, batch, first, takes: &takes };
            rows.add(bytes, &given, names)
        })?;
        added.map_err(|refused| match refused {
            Refused::Malformed => malformed(Malformed),
            Refused::Panic(message) => panicked(&message),
            Refused::Mismatch => PyValueError::new_err("the request has more or fewer items than there are identities or numbers"),
        })
    }

    /// The number of rows.
    fn __len__(&self) -> usize {
        self.rows.as_ref().map_or(0, |rows| rows.count() as usize)
    }

    /// Repeated attribute keys, which were dropped.
    #[getter]
    fn repeated(&self) -> u64 {
        self.rows.as_ref().map_or(0, |rows| rows.repeated)
    }

    /// Ends the block, and returns its bytes in pieces.
    fn take(&mut self) -> PyResult<Taken> {
        let rows = self.rows.take().ok_or_else(|| PyValueError::new_err("the rows have been taken"))?;
        Ok(Taken { pieces: rows.into_pieces() })
    }
}

/// The bytes of a block in ClickHouse's Native format, piece by piece.
#[pyclass]
struct Taken {
    pieces: Pieces,
}

#[pymethods]
impl Taken {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__<'py>(&mut self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.pieces.next_piece().map(|piece| PyBytes::new(py, &piece))
    }
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("MalformedError", module.py().get_type::<MalformedError>())?;
    module.add("PanicError", module.py().get_type::<PanicError>())?;
    module.add_class::<Core>()?;
    module.add_class::<Rows>()?;
    Ok(())
}
