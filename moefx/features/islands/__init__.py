"""Islands: runs of ops between exchanges and products, each one function that Inductor compiles."""
