"""Who is an expert of what: the values of a captured graph on drawn inputs, and how rows are taken and put back."""
