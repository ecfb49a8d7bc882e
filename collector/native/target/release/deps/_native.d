/tmp/w/wt-core/collector/native/target/release/deps/_native.d: binding/src/lib.rs

/tmp/w/wt-core/collector/native/target/release/deps/lib_native.so: binding/src/lib.rs

binding/src/lib.rs:
