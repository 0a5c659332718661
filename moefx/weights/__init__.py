"""Values of models: from meta devices, safetensors files, transformers' names, plain checkpoints."""
