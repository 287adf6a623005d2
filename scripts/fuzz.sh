#!/bin/sh
# Fuzzes every target of fuzz/ in turn, each for SECONDS; stops at the first finding, which cargo-fuzz saves and names.
# usage: fuzz.sh SECONDS
# Ordinary tests replay the seed corpus; this looks for what nobody has thought of.
set -eu

seconds=${1:?usage: fuzz.sh SECONDS}
if ! cargo fuzz --version >/dev/null 2>&1; then
    echo "gradwire: missing cargo-fuzz: cargo install cargo-fuzz" >&2
    exit 1
fi
# Coverage instrumentation needs unstable flags; a stable compiler takes them only when told so.
rustc --version | grep -q nightly || export RUSTC_BOOTSTRAP=1

cd "$(dirname "$0")/.."
for target in $(cargo fuzz list); do
    echo "fuzzing $target for $seconds s"
    # Without a sanitizer: all but the engine's socket code is safe Rust, and panics are found either way.
    cargo fuzz run --sanitizer none "$target" -- -max_total_time="$seconds"
done
