//! Skeleton; see docs/architecture.md.
