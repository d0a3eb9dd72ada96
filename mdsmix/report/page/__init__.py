"""The page of `mdsmix report`: a whole mix in one HTML file. README.md here has the design."""
