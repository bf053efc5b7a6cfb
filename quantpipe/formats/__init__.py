"""What is on disk: the tensors a quantized layer stores, what their numbers mean, and the model folder around them."""
