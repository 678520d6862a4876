"""Speed and memory, measured side by side; run by hand, never as tests."""
