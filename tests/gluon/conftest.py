"""Set-up for the tests of the Gluon interpreter."""

import pytest
import torch


@pytest.fixture(autouse=True)
def small_and_repeatable():
    """The same numbers every time; tiny products are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
