import numpy as np
class EmaEstimator:
    def __init__(self, ema): self.ema = ema
    def estimate(self, params, prompts): return self.ema.estimate([p.id for p in prompts])
    def update(self, params, prompts, positive, total): self.ema.update([p.id for p in prompts], positive, total)
    def metrics(self): return {}
    def state_dict(self): return self.ema.state_dict()
    def load_state_dict(self, s): self.ema.load_state_dict(s)
class ValueEstimator: pass
