/tmp/w/wt-core/collector/native/target/release/deps/rows-fc84321cb8ca6ec2.d: rows/src/lib.rs rows/src/attributes.rs rows/src/block.rs rows/src/check.rs rows/src/config.rs rows/src/logs.rs rows/src/scan.rs rows/src/traces.rs rows/src/value.rs rows/src/wire.rs

/tmp/w/wt-core/collector/native/target/release/deps/librows-fc84321cb8ca6ec2.rlib: rows/src/lib.rs rows/src/attributes.rs rows/src/block.rs rows/src/check.rs rows/src/config.rs rows/src/logs.rs rows/src/scan.rs rows/src/traces.rs rows/src/value.rs rows/src/wire.rs

/tmp/w/wt-core/collector/native/target/release/deps/librows-fc84321cb8ca6ec2.rmeta: rows/src/lib.rs rows/src/attributes.rs rows/src/block.rs rows/src/check.rs rows/src/config.rs rows/src/logs.rs rows/src/scan.rs rows/src/traces.rs rows/src/value.rs rows/src/wire.rs

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
