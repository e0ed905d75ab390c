import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """The models are tiny: a second thread costs more than it gives, on a busy machine a hundredfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
