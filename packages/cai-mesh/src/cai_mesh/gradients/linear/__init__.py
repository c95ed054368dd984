"""The linear seam: rules, products and readers, and where a layer's weight gradient goes."""
