"""Files of `y = 2 * x + 1` for FP32 `x` of shape [-1, 3] in formats whose libraries take too long to import in a test.

The SavedModel is what `tensorflow.compat.v1.saved_model.simple_save` wrote, the TensorFlow Lite file what
`tensorflow.lite.TFLiteConverter` did. The PaddlePaddle file is made here, from its protobuf format.
"""

import base64
import struct
from collections.abc import Callable
from pathlib import Path

SAVED_MODEL = (
    "2munj2MXi@61D;gL<$8#WMoz{5(WwZcp?E*5(WwZc_IN+8U_jhdLjW-"
    "A{`0=R1ySqd2nSq5(*G94h|Cm0t68j7X}3b2?!E^0RfN!0SY(@1w(Icb95RH3I=a=bZ~WaA_Zi0d2nSS4+;f#VQh6}5(ac-ZgX#P"
    "A`J=!WOR9OWfBB*d2nS4E(!=qWMyu2X>@rK3JL{jZg6#UA^}ty3kn8rb#!obbRq#%A_)osR1ySqd2nS4KMDg)b!-"
    "v_3ITW`0aOwO3ITZ{0aO|W3ITc|0aPL#3IS9S1ax_DWjYcH5Hb!969EDQ1`!1V78eN!5|9A_3PTDDP;6miWoU0~WMy(14+;ivb#!"
    "obbRq?0ba`-"
    "PA`J=!WOR9OWfBB*d2nSS6bc1%Xkl<=5(RT;VQ^&{1Udp30U`x+WpZ|9Dh4txGBGYNG8%R=E;2DLFfDRpF)cMMXJIrrF=8<=GBz+"
    "|65j&~WC{Uz5(`jlVPj=zZ){{`aw;bZ4qtC|bZ~WaUvp?-"
    "aAk866$%qN5fTds|NsC0|NsC0{{a#L2m>k$3I$|zd2nSC0x$t890~<<Xkl<=5)(QR5(^0b|NsC0|NsC00TKcT0}4tC1#NX~FL)9K"
    "LvL<#bSf4K4qtC|bZ~WaUvp?-"
    "aAk861PTH=04fU#1!Q!2aAgt#FaatR3I%pyY;|Q43_=PB0TKWz1ONa4Kng|*18sF|5(7<jY#Ie^b!;zq8Uc7J2MPgH5&|#*DklmK"
    "UvG7EaCLNFb7*03Wpff03KKdJ5(^0b|NsC0|NsC00TKcT0}4tC1z}`lFL@FLLvL<#bSf4K4qtC|bZ~WaUvp?-"
    "aAk861PTH=04fU#1!Q!2aAgt#FaatR3I%pyY;|Q43_=PB0TKWz1ONblKMG0;17T!j5(PnIWL7d718sF|8U<lwWG{It2MPgH5&|#*"
    "DklmKUvG7EaCLNFb7*03Wpff03KKdJ5(^0b|NsC0|NsC00TKcT0}4b60eKP#Nn~YibZK;X8UtZuWGV*=0aOwKFaatj3Jzayb#!ob"
    "bYF95VQ^)05)}#)IuQ~J2><{8|NsC0|Nj9J0tf>V03rhjsuL=43J-H-"
    "a&~EMXJ2GxW?^+~bP`?)9|{3@5*i8vcsei;0U8k!3kd)J|NsC0|Ns915&{SV5+4cyc@i2519>_y5CIwy5(^0b|NsC0|NsC00TKcT"
    "0~#81Wo~nCa%OCAcQ12ga&~EMXD@JaWn^h%bN"
)

TENSORFLOW_LITE = (
    "8~^|SR7OlQ6aXLq8~_*q6aWwa3;+NC2mk~C6aWAK8~^|Sga7~l+yDRoya50J%mDxZ90ULW0{{R30RR915C8xG000UA5C9AS2mk~C"
    "3IG5A3;+NC8~^|SGynhq4*&oFb7gXNX>Mm<WMyVyb!>D10RR911ONa4r2qf_1ONa41ONa40RR91c>n+a0RR911ONa4&i?=Z1ONa4"
    "0RR91cmMzZ0ssI2Gynhq1ONa4-"
    "2eao2LJ#71ONa46951JLr+dtMN(5qPflM=MN~mVK~zBi2mlNK2mk~C2mk;81^@s61ONa46951JZE0>_a&>NWX>Da+c4cyNX>V=-"
    "2mk;8+yDRo)BpegzyJUMqyPW_oB#j-"
    "lmGw#bN~PV1ONa4UjP691ONa4U;qFB5C8xG000002mlTM2mk~C2mk;85C8xGBme*a000I62mk~C1^@s61ONa4000003;-"
    "Aa6aWwa3;+ZG3;+NC)xPWhWV6r20{{R30ssI21ONa41^@s6GA=SPE-"
    "(N9%K!iW1ONa45C8xGF)lSOFaQ7m0000000000RQ><|SpEP1?*IS)1ONa41ONa40000$000I62mk~C1^@s61ONa41ONa4004kLg#"
    "G{ji2eWn4*&oFO-xBrAVY6%c4cyOWn?Y@0RR916aWAK000gE7yuLi5C9AS2mk~C4gdfE6aWAK8~^|Spa1{>qyPW_r~m)}1ONa4ZD"
    "DC{000000ssI2SO5S36aWAK000gE7yuLi5C9AS3jhQF4gdfE6aWAK0000B5C8xG6aWAK0RR915dQ!F0RR911ONa40ssI20{{R30R"
    "R91000gE6aWAK5C9AS3jhQF4gdfE5C8xG0000L3;+NC5C8xGO#c7>0RR910{{R30ssI2000000ssI20RR911ONa40RR91000001p"
    "oj5ECB!j<NyEwoB#j-"
    "SO5S31ONa4{{H{}000016aWAK8~^|S8~^|S1poj5EC2ui0ssI2|NsC00{{R3wEqA95dZ)HP+@X(X>@6CZe?UcVQg$VFaQ7m0ssI2"
    "0RR910{{R3PXGV^000016aWAK8~^|S8~^|S1ONa48~^|S0ssI2|NsC00{{R31poj40{{R3ZFOt_0ssI20RR910{{R3(*OVe00001"
    "5C8xG5C8xG0{{R36aWAKH2?qq1poj5ZFOufcmMzZ00000000&M7yuLi000mG3;+lK00000000L7761SM000015C8xG5C8xG0ssI2"
    "6aWAKc>n+Z1poj5VPs@4c>n+a00000000&M8~_*q000yK5C9AS000002ml8F761SM000016aWAK8~^|S8~^|S0RR91EC2ui0ssI2"
    "|NsC00{{R3%>V!Y6951Jb7gXNX>Mm<WMyVyb!>EBcseiu0ssI20RR910{{R30ssI28~^|S2mk;81ONm81ONa43;+xO3jhEB000C4"
    "3;+NC5&!@I0000I"
)


def write_saved_model(path: Path) -> None:
    """`path` is the directory."""
    path.mkdir(parents=True)
    (path / "saved_model.pb").write_bytes(base64.b85decode(SAVED_MODEL))


def write_tensorflow_lite(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base64.b85decode(TENSORFLOW_LITE))


def write_paddle(path: Path) -> None:
    """A ProgramDesc with the operation `scale` between a feed and a fetch, and no weights beside it."""
    float32, tensor, feed, fetch = 5, 7, 9, 10
    shape = _number(1, float32) + _number(2, -1) + _number(2, 3)
    of_tensor = _number(1, tensor) + _message(3, _message(1, shape))
    variables = {"x": of_tensor, "y": of_tensor, "feed": _number(1, feed), "fetch": _number(1, fetch)}
    int_type, float_type, bool_type = 0, 1, 6
    column = _attribute("col", int_type, _number(3, 0))
    scale = b"".join(
        (
            _attribute("scale", float_type, _float(4, 2.0)),
            _attribute("bias", float_type, _float(4, 1.0)),
            _attribute("bias_after_scale", bool_type, _number(10, 1)),
        )
    )
    operations = (
        _operation("feed", "feed", "x", column),
        _operation("scale", "x", "y", scale),
        _operation("fetch", "y", "fetch", column),
    )
    block = _number(1, 0) + _number(2, -1)
    for name, kind in variables.items():
        block += _message(3, _text(1, name) + _message(2, kind))
    for operation in operations:
        block += _message(4, operation)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_message(1, block) + _message(4, _number(1, 0)))


WRITERS: dict[str, Callable[[Path], None]] = {
    "model.savedmodel": write_saved_model,
    "model.tflite": write_tensorflow_lite,
    "model.pdmodel": write_paddle,
}


def _operation(kind: str, source: str, target: str, attributes: bytes) -> bytes:
    given, made = _text(1, "X") + _text(2, source), _text(1, "Out") + _text(2, target)
    return _message(1, given) + _message(2, made) + _text(3, kind) + attributes


def _attribute(name: str, kind: int, value: bytes) -> bytes:
    return _message(4, _text(1, name) + _number(2, kind) + value)


def _varint(value: int) -> bytes:
    value &= 2**64 - 1
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes((*digits, value))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())
