"""What the tests with real servers share: how to ask, what is asked, which servers run."""
