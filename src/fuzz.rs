//! What others send or write must not make the process panic. Each target is a test whose name
//! begins with `whatever`: of a few hundred cases in the suite, and of as many as there is time for
//! with
//!
//! ```sh
//! FUZZ_SECONDS=600 cargo test --release --lib whatever -- --nocapture --test-threads 1
//! ```

use std::time::{Duration, Instant};

use proptest::{
    strategy::Strategy,
    test_runner::{Config, TestCaseError, TestRunner},
};

/// Checks cases of `strategy` until the time is over. A panic is a failure, too.
pub(crate) fn fuzz<S: Strategy>(
    strategy: S,
    check: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    let seconds = std::env::var("FUZZ_SECONDS").map_or(0, |text| text.parse().expect("seconds"));
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut cases = 0;
    while cases == 0 || Instant::now() < end {
        // A runner stops for good after its cases; each begins with a seed of its own.
        let config = Config { failure_persistence: None, ..Config::default() };
        cases += u64::from(config.cases);
        if let Err(why) = TestRunner::new(config).run(&strategy, &check) {
            panic!("{why}");
        }
    }
    println!("{cases} cases");
}
