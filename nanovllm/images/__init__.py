"""Images as callers give them, to pixels: paths, data: URLs, http, Pillow's images. Knows no model and no engine."""
