import torch, transformers, time, sys
sys.argv=["x"]
import engine as E
from cai_apps.engine import LLM, EngineOptions, Sampling
from cai_kernels.swap import swap
from torch.profiler import profile, ProfilerActivity
m=E.model_of(E.SHAPES["llama-8b"],8); swap(m,kinds=E.KINDS)
llm=LLM(m,options=EngineOptions(batch_tokens=8192)); llm._is_live=False
for n in (8192,):
    ids=torch.randint(0,1000,(n,)).tolist(); llm.generate([ids],temperature=0,max_tokens=1); llm.forget()
    ids=torch.randint(0,1000,(n,)).tolist()
    torch.cuda.synchronize(); t=time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as p: llm.generate([ids],temperature=0,max_tokens=1); torch.cuda.synchronize()
    print(n, time.perf_counter()-t)
    rows=sorted(p.key_averages(),key=lambda r:-r.device_time_total)
    print("kernels", sum(r.device_time_total for r in rows)/1e3,"ms")
    for r in rows[:16]: print(f"{r.device_time_total:9.0f} us {r.count:4d} x {r.key[:100]}")
    torch.cuda.synchronize(); t=time.perf_counter(); llm.forget(); llm.generate([ids],temperature=0,max_tokens=1); print("wall", time.perf_counter()-t)
    import cProfile,pstats; llm.forget(); c=cProfile.Profile(); c.enable(); llm.generate([ids],temperature=0,max_tokens=1); c.disable(); pstats.Stats(c).sort_stats("cumtime").print_stats(18)
