"""Whole pools in one thread on a virtual clock: the real engine and control code over a network that fails by seed.

Real: vLLM's `Scheduler`, both connector halves, `Writer`, `Receiver`, `Dispatcher`, `PrefillerClient`, `FenceClient`,
`FenceServer._receive`, every table and codec. Simulated: time, threads, the event loop's clock, sockets, the transport,
the model (`pages` holds which tokens a page stands for instead of numbers).
"""
