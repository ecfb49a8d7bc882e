"""Decide which SQL may run on the read-only endpoint. Pure: text in, a plan or QueryError out; ClickHouse's own parser does the parsing.

chdb's `readonly=1` is not enough: it still runs INTO OUTFILE, and reads files and URLs. So, in this order:

1. `split` refuses the word OUTFILE anywhere, and recognises SHOW, DESCRIBE, EXPLAIN and EXISTS by fixed patterns.
2. ClickHouse formats the text as data (`formatQuery({q:String})`): one statement, without comments, in canonical form.
3. `inner` takes the trailing FORMAT and SETTINGS off the canonical text; `check_tree` checks the EXPLAIN AST output of the rest:
   a SELECT without settings, table functions, scalar functions with outside access, or system tables about other users.
4. It runs as `SELECT * FROM (…)`, in which INTO OUTFILE is a syntax error.

The cost of a query (memory, time, rows) is limited on the reading connections (traces/chdb.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from agl_otel.errors import QueryError

MAX_QUERY_BYTES: Final = 256 << 10

# Table functions that only generate rows. All others (file, url, s3, remote, executable, python, …), unknown ones too, are refused.
SAFE_TABLE_FUNCTIONS: Final = frozenset(
    {"numbers", "numbers_mt", "zeros", "zeros_mt", "generateseries", "generate_series", "values", "format", "view", "null", "primes"}
)
# Scalar functions that access the outside, write (counters in Keeper, the server's log), reveal what clients send, or burn time: no
# limit interrupts a function within a block of rows, and those whose time is quadratic in their input can occupy a thread for days.
# Their names are refused as identifiers, too: a function can be passed to another (arrayMap(file, …)).
REFUSED_FUNCTIONS: Final = re.compile(
    r"(?i:file|sleep|sleepeachrow|dict\w+|dictionary|joinget\w*|catboost\w*|eval|addressto\w+|showcertificate"
    r"|generateserialid|logtrace|hascolumnintable|getclienthttpheader|currentrequesturl|editdistance\w*|\w*levenshtein\w*|jaro\w*|seriesdecomposestl)"
    r"|(?:ai|AI)[A-Z]\w*"
)
# ClickHouse's system tables that describe it, in which readers see only our rows (`READERS_SEE` in traces/engine.py). All others
# reveal other users and their queries, or block every thread.
DESCRIBING_TABLES: Final = frozenset(
    {"one", "numbers", "numbers_mt", "zeros", "zeros_mt", "primes", "databases", "tables", "columns", "parts", "functions",
     "table_functions", "settings", "formats", "data_type_families", "table_engines", "build_options", "time_zones", "keywords",
     "contributors", "aggregate_function_combinators", "collations", "merge_tree_settings"}
)  # fmt: skip
# System tables that report on ClickHouse's work, which is all ours if it is embedded. Tables with statements or errors are left out,
# because those quote queries and deleted data: `errors`, `mutations`, `view_refreshes`.
REPORTING_TABLES: Final = frozenset(
    {"merges", "metrics", "events", "asynchronous_metrics", "disks", "parts_columns", "detached_parts", "data_skipping_indices",
     "projections", "licenses", "codecs"}
)  # fmt: skip
# Settings that a client may send: output format, and lower limits. Others are dropped (in a URL) or refused (in the SQL).
ALLOWED_SETTINGS: Final = re.compile(
    r"output_format_(?!schema)\w+|date_time_output_format|format_\w*null\w*|max_block_size|limit|offset|join_use_nulls|"
    r"aggregate_functions_null_for_empty|transform_null_in|use_hive_partitioning|session_timezone|wait_end_of_query|extremes|"
    r"final|optimize_read_in_order|prefer_column_name_to_alias|cast_keep_nullable|allow_experimental_analyzer|enable_analyzer"
)
ONE_THREAD: Final = ("max_threads", "1")  # a limit of ours, which may be lowered
FORMATS: Final = re.compile(
    r"JSON\w*|CSV\w*|TSV\w*|TabSeparated\w*|Native|RowBinary\w*|Arrow|ArrowStream|Parquet|Pretty\w*|Values|Vertical|XML|Null|Markdown|RawBLOB|LineAsString"
)
CONTENT_TYPES: Final = {
    "JSON": "application/json; charset=UTF-8",
    "JSONCompact": "application/json; charset=UTF-8",
    "JSONEachRow": "application/x-ndjson; charset=UTF-8",
    "JSONCompactEachRow": "application/x-ndjson; charset=UTF-8",
    "Native": "application/octet-stream",
    "Arrow": "application/octet-stream",
    "ArrowStream": "application/octet-stream",
    "Parquet": "application/octet-stream",
    "CSV": "text/csv; charset=UTF-8; header=absent",
    "CSVWithNames": "text/csv; charset=UTF-8; header=present",
    "TabSeparated": "text/tab-separated-values; charset=UTF-8",
}
SETTING_VALUE: Final = re.compile(r"-?\d+(\.\d+)?|'[A-Za-z0-9_ /:+.-]*'|true|false")

_NAME: Final = r"(?:[A-Za-z_]\w*|`\w+`|\"\w+\")"
_TABLE: Final = rf"{_NAME}(?:\.{_NAME})?"
_LIKE: Final = r"(?:\s+(?:NOT\s+)?I?LIKE\s+'[\w%. -]*')?"
_FIXED: Final = re.compile(
    rf"""SHOW\s+(?:DATABASES|(?:FULL\s+)?TABLES(?:\s+(?:FROM|IN)\s+{_NAME})?){_LIKE}
    |SHOW\s+CREATE\s+(?:TABLE\s+|VIEW\s+|DATABASE\s+)?{_TABLE}
    |SHOW\s+(?:EXTENDED\s+)?(?:FULL\s+)?(?:COLUMNS|FIELDS)\s+(?:FROM|IN)\s+{_NAME}(?:\s+(?:FROM|IN)\s+{_NAME})?{_LIKE}
    |SHOW\s+(?:FUNCTIONS|SETTINGS|ENGINES){_LIKE}
    |EXISTS\s+(?:TABLE\s+|VIEW\s+|DATABASE\s+)?{_TABLE}
    |DESC(?:RIBE)?\s+(?:TABLE\s+)?{_TABLE}""",
    re.I | re.X,
)
_EXPLAIN: Final = re.compile(r"EXPLAIN\s+(?:(AST|SYNTAX|PLAN|PIPELINE|ESTIMATE|QUERY\s+TREE)\s+)?(?=SELECT\b|WITH\b|\()", re.I)
_DESCRIBE_QUERY: Final = re.compile(r"DESC(?:RIBE)?\s+(?:TABLE\s+)?\((.*)\)", re.I | re.S)
_FORMAT: Final = re.compile(r"\bFORMAT\s+`?(\w+)`?\s*$", re.I)
_SETTINGS: Final = re.compile(
    rf"\bSETTINGS\s+((?:\w+\s*=\s*(?:{SETTING_VALUE.pattern})\s*,\s*)*\w+\s*=\s*(?:{SETTING_VALUE.pattern}))\s*$", re.I
)
_IDENTIFIER_NODE: Final = re.compile(r"^ *(?:Table)?Identifier (\S+)", re.M)
_SYSTEM_TABLE: Final = re.compile(r"`?system`?\.`?(\w+)`?.*", re.I)
_SYSTEM_ALIAS: Final = re.compile(r"\(alias `?system`?\.", re.I)  # such an alias would apply the filter of another table
_FUNCTION_NODE: Final = re.compile(r"^ *Function (\S+)", re.M)
_APPLY_NODE: Final = re.compile(r"^ *ColumnsApplyTransformer", re.M)  # EXPLAIN AST does not show what it applies
_SETTINGS_NODE: Final = re.compile(r"^ *Set\b", re.M)


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement that may proceed."""

    kind: Literal["select", "fixed"]
    """`fixed`: run `text` unchanged; `select`: format, check, wrap."""
    text: str
    format_name: str = ""
    """The FORMAT in the text; empty if there is none."""
    prefix: str = ""
    """Prefix of the wrapped query: `EXPLAIN PLAN`, `DESCRIBE`."""


def split(sql: str) -> Statement:
    """Step 1: classify the text. Raises QueryError."""
    if len(sql.encode()) > MAX_QUERY_BYTES:
        raise QueryError(f"the query is longer than {MAX_QUERY_BYTES >> 10} KiB; pass long lists as parameters, {{name:Array(String)}}")
    if re.search("outfile", sql, re.I):
        raise QueryError("INTO OUTFILE is not allowed here (nor the word in a literal: pass that text as a parameter, {name:String})")
    text = _strip_leading_comments(sql).rstrip().rstrip(";").rstrip()
    if not text:
        raise QueryError("Empty query")
    bare, format_name = take_format(text)
    if _FIXED.fullmatch(bare):
        return Statement("fixed", bare, format_name)
    if explain := _EXPLAIN.match(bare):
        return Statement("select", bare[explain.end() :], format_name, prefix=bare[: explain.end()].strip())
    if describe := _DESCRIBE_QUERY.fullmatch(bare):
        return Statement("select", describe.group(1), format_name, prefix="DESCRIBE")
    if not re.match(r"(?:SELECT|WITH|\(|FROM)\b|\(", bare, re.I):
        word = re.split(r"\W", bare, maxsplit=1)[0][:30]
        raise QueryError(
            f"only reading is allowed here: SELECT, WITH, SHOW, DESCRIBE, EXPLAIN and EXISTS, not {word!r}. Data comes in through OTLP"
        )
    return Statement("select", text, format_name)


def inner(canonical: str) -> tuple[str, dict[str, str], str]:
    """Split a canonical text into (query, allowed settings, FORMAT). Raises QueryError for other settings."""
    text, before = take_format(canonical.strip())
    text, settings = take_settings(text)
    text, after = take_format(text)
    return text, settings, before or after


def check_format(name: str) -> str:
    """Return `name` if that format only writes output (some others access schema files). Raises QueryError."""
    if not FORMATS.fullmatch(name):
        raise QueryError(f"the format {name!r} is not available here")
    return name


def parameter_text(text: str) -> str:
    """Encode `text` as the value of a {name:String} parameter."""
    return text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n")


def take_format(text: str) -> tuple[str, str]:
    """Split off a trailing FORMAT: (rest of the text, format name or an empty string)."""
    found = _FORMAT.search(text)
    return (text[: found.start()].rstrip(), found.group(1)) if found else (text, "")


def take_settings(text: str) -> tuple[str, dict[str, str]]:
    """Split off a trailing SETTINGS clause: (rest of the text, its allowed settings). Raises QueryError for others."""
    found = _SETTINGS.search(text)
    if found is None:
        return text, {}
    settings: dict[str, str] = {}
    for part in re.findall(rf"(\w+)\s*=\s*({SETTING_VALUE.pattern})", found.group(1)):
        if not _may_be_set(*part[:2]):
            raise QueryError(f"the setting {part[0]} cannot be changed on this read-only endpoint")
        settings[part[0]] = part[1]
    return text[: found.start()].rstrip(), settings


def filter_settings(sent: Mapping[str, str]) -> dict[str, str]:
    """Return the allowed settings of a URL as SQL literals; others are dropped (clients send many)."""
    kept: dict[str, str] = {}
    for name, value in sent.items():
        literal = value if re.fullmatch(r"-?\d+(\.\d+)?", value) else f"'{value}'"
        if _may_be_set(name, literal) and SETTING_VALUE.fullmatch(literal):
            kept[name] = literal
    return kept


def _may_be_set(name: str, literal: str) -> bool:
    return (name, literal) == ONE_THREAD or ALLOWED_SETTINGS.fullmatch(name) is not None


def check_tree(tree: str, table_functions: frozenset[str]) -> None:
    """Step 3: check the EXPLAIN AST output of one statement. `table_functions` are all of this ClickHouse's, in lower case."""
    if not tree.startswith("SelectWithUnionQuery"):
        raise QueryError("only a SELECT can run here")
    if _SETTINGS_NODE.search(tree):
        raise QueryError("SETTINGS is allowed at the end of the query only, and only for how the answer looks")
    if _APPLY_NODE.search(tree):
        raise QueryError("APPLY is not allowed here: write the function around each column")
    if _SYSTEM_ALIAS.search(tree):
        raise QueryError("an alias may not be called as a system table")
    for name in _IDENTIFIER_NODE.findall(tree):
        system = _SYSTEM_TABLE.fullmatch(name)
        if system and system[1] not in DESCRIBING_TABLES | REPORTING_TABLES:
            raise QueryError(f"the table {name} is not available here")
        if REFUSED_FUNCTIONS.fullmatch(name):
            raise QueryError(f"the name {name} is not allowed here: it is a function that may not be used")
    for name in _FUNCTION_NODE.findall(tree):
        lower = name.lower()
        if lower in table_functions and lower not in SAFE_TABLE_FUNCTIONS:
            raise QueryError(f"the table function {name} reaches outside of the stored traces and is not allowed here")
        if REFUSED_FUNCTIONS.fullmatch(name):
            raise QueryError(f"the function {name} is not allowed here")


def is_settled(canonical: str) -> bool:
    """Return whether `check_tree` is independent of parameter values: a value is a literal in the tree, an {x:Identifier} a name."""
    return "identifier" not in canonical.lower()


def wrap(text: str, prefix: str, settings: Mapping[str, str]) -> str:
    """Step 4: wrap the query."""
    tail = "\nSETTINGS " + ", ".join(f"{name} = {value}" for name, value in settings.items()) if settings else ""
    if prefix.upper().startswith("DESC"):
        return f"DESCRIBE (\n{text}\n)"
    return f"{prefix} SELECT * FROM (\n{text}\n){tail}".lstrip()


def _strip_leading_comments(sql: str) -> str:
    return re.sub(r"\A(?:\s+|--[^\n]*(?:\n|\Z)|#!?[^\n]*(?:\n|\Z)|/\*.*?\*/)+", "", sql, flags=re.S)
