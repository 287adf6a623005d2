//! One shard to one peer: the sending half, the receiving half, and the packet grid they share.
