//! What ranks tell each other before they connect.
