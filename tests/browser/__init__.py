"""The report in a real headless Chromium: `make test-browser`."""
