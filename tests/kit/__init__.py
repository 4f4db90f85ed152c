"""Builders and checks that several tiers of tests share."""
