"""Answers a request with many tiny responses as fast as it can: what Triton's Python backend itself can carry.

The prompt is JSON: `n` responses, `k` elements in each, sent by `threads` shared threads (0: by execute itself).
"""

import json
import queue
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.work = queue.SimpleQueue()
        self.threads = 0

    def execute(self, requests):
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "text_input")
            plan = json.loads(tensor.as_numpy()[0])
            state = [request.get_response_sender(), plan["n"], plan["k"]]
            if not plan["threads"]:
                while self.send(state):
                    pass
                continue
            while self.threads < plan["threads"]:
                self.threads += 1
                threading.Thread(target=self.run, daemon=True).start()
            self.work.put(state)

    def run(self):
        while True:
            state = self.work.get()
            if self.send(state):
                self.work.put(state)

    def send(self, state):
        sender, left, k = state
        tensor = pb_utils.Tensor("text_output", np.array([b"token"] * k, dtype=np.object_))
        sender.send(pb_utils.InferenceResponse([tensor]), FINAL if left == 1 else 0)
        state[1] -= 1
        return state[1]
