"""Networks whose published weights the demo serves, written from their papers in plain torch.

Parameter names are the published ones, so weights load strictly. No weights, no preprocessing, no I/O here.
"""

from runtime.demo.architectures.faces import mtcnn_onet, mtcnn_pnet, mtcnn_rnet
from runtime.demo.architectures.pitch import crepe
from runtime.demo.architectures.voice import silero_vad, speaker_encoder

__all__ = ["crepe", "mtcnn_onet", "mtcnn_pnet", "mtcnn_rnet", "silero_vad", "speaker_encoder"]
