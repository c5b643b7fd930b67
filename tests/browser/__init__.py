"""The page of `holdfast report` in a real browser: Debian's chromium, driven by playwright."""
