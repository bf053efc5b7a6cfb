"""What is on disk: which tensors a quantized layer stores, what their numbers mean, and the model folder around them."""
