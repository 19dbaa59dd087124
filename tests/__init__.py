"""The tests of fshard: pure ones, and ones over real gloo processes that live as long as the test run."""
