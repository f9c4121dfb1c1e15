"""The CPU worker for vLLM's V2 model runner; its process needs `second_runner/sitecustomize.py` as well."""

from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop, _torch_cuda_wrapper
from vllm.v1.worker.cpu_worker import CPUWorker


class SecondRunnerWorker(CPUWorker):
    """Streams and events do nothing, as vLLM arranges it for its V1 runner on a CPU; V2 asks for them later as well."""

    def init_device(self) -> None:
        _set_torch_accelerator_to_noop()
        self._streams = _torch_cuda_wrapper()  # held, so that it stays in force
        self._streams.__enter__()
        super().init_device()
