/tmp/w/wt-core/collector/native/target/release/deps/rows-1e9e360a1bd6f671.d: rows/src/lib.rs rows/src/attributes.rs rows/src/block.rs rows/src/check.rs rows/src/config.rs rows/src/logs.rs rows/src/scan.rs rows/src/traces.rs rows/src/value.rs rows/src/wire.rs

/tmp/w/wt-core/collector/native/target/release/deps/librows-1e9e360a1bd6f671.rlib: rows/src/lib.rs rows/src/attributes.rs rows/src/block.rs rows/src/check.rs rows/src/config.rs rows/src/logs.rs rows/src/scan.rs rows/src/traces.rs rows/src/value.rs rows/src/wire.rs

/tmp/w/wt-core/collector/native/target/release/deps/librows-1e9e360a1bd6f671.rmeta: rows/src/lib.rs rows/src/attributes.rs rows/src/block.rs rows/src/check.rs rows/src/config.rs rows/src/logs.rs rows/src/scan.rs rows/src/traces.rs rows/src/value.rs rows/src/wire.rs

rows/src/lib.rs:
rows/src/attributes.rs:
rows/src/block.rs:
rows/src/check.rs:
rows/src/config.rs:
rows/src/logs.rs:
rows/src/scan.rs:
rows/src/traces.rs:
rows/src/value.rs:
rows/src/wire.rs:
