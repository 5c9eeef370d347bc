"""Simulated Neuron devices, compiler and runtime."""
