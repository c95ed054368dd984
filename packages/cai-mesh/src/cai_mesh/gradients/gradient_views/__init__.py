"""Parameters whose `.grad` shows a gradient that lies elsewhere, in parts over ranks or in a chunk."""
