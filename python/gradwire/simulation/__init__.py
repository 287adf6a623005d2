"""A training step's communication on a cluster that is not there: `gradwire simulate` (docs/simulation.md)."""
