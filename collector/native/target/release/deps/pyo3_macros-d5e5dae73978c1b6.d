/tmp/w/wt-core/collector/native/target/release/deps/pyo3_macros-d5e5dae73978c1b6.d: /root/.cargo/registry/src/index.crates.io-1949cf8c6b5b557f/pyo3-macros-0.30.1/src/lib.rs

/tmp/w/wt-core/collector/native/target/release/deps/libpyo3_macros-d5e5dae73978c1b6.so: /root/.cargo/registry/src/index.crates.io-1949cf8c6b5b557f/pyo3-macros-0.30.1/src/lib.rs

/root/.cargo/registry/src/index.crates.io-1949cf8c6b5b557f/pyo3-macros-0.30.1/src/lib.rs:

# env-dep:CARGO_PKG_VERSION=0.30.1
