"""The test kit that ships: conformance suites, a fake clock, faulty stores, real servers."""
