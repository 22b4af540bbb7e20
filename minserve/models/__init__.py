"""What a forward is: architectures, layers, weights and the sampler."""
