"""The demo: a wave in memory that two sides share."""
