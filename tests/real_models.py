"""The models whose config.json is in the folder of real data:
file name -> their published number of parameters.
"""

PARAMETERS = {
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-4B-Instruct-2507": 4_022_468_096,
}
