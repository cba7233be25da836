"""Set-up for the tests of the Gluon interpreter."""

import pytest
import torch


@pytest.fixture(autouse=True)
def where_it_runs(request):
    """Interpreted kernels want a process in which Triton interprets, and that is one without a GPU."""
    if torch.cuda.is_available() and request.node.get_closest_marker("gpu") is None:
        pytest.skip("interpreted where there is no GPU")


@pytest.fixture(autouse=True)
def small_and_repeatable():
    """The same numbers every time; tiny products are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
