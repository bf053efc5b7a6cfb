"""The base model as the quantizer runs it: read block by block, experts taken apart, passes that stop on their way."""
