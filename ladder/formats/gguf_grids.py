"""The grids of GGUF's IQ types: which vectors of levels a stored index means.

The numbers are those of ``ggml-common.h`` of llama.cpp (``iq2xxs_grid`` and so on), as indices of levels.
"""

from __future__ import annotations

import base64
import zlib
from functools import cache

import numpy as np
import numpy.typing as npt

GRIDS = {
    "iq2_xxs": (256, 8, 2),
    "iq2_xs": (512, 8, 2),
    "iq2_s": (1024, 8, 2),
    "iq3_xxs": (256, 4, 3),
    "iq3_s": (512, 4, 3),
    "iq1_s": (2048, 8, 2),
}
"""Name -> vectors, elements of one, bits of a level; in the order of `PACKED`."""


@cache
def grid(name: str) -> npt.NDArray[np.uint8]:
    """Return the levels of all vectors of a grid, [vectors, elements]."""
    words = np.frombuffer(zlib.decompress(base64.b85decode(PACKED)), "<u2")
    first = 0
    for other, (count, length, bits) in GRIDS.items():
        if other == name:
            shifts = np.arange(0, length * bits, bits, dtype=np.uint16)
            levels = words[first : first + count, None] >> shifts & np.uint16((1 << bits) - 1)
            return levels.astype(np.uint8)
        first += count
    raise KeyError(name)


PACKED = (
    "c-obj{gd;0dEO<hq?NV%>`F#5mMOtDwy_P<P)b`~!c_8+jJ2dw$&rNQBvac+?%FAxq_31@GPbddZ4$5@%dr<4Y}a<ZW*BIi="
    "@8n^oO6KT99}YTng-}8nGlkeH0?~9nWl8o&h&nq?Nbirm;MF2JA2)q&vku;AQ(a*6hb2`!Xa@aiDZ#HA|W!OAvRJ&T%?V3kr"
    "A>%P!vZQlt)Fhhb~YA!>}aQ#ZVl_89affa1k%yCA^Av@E$(Kw>Uyz1VzM&BGDw;#DoZu3@MU5a!Vo<K~WS(Whsf0DUB*q0}2"
    "m`A&ll|l))K>NiZT)WqQn*2^fT>*f^`P6}HW$!b%w7C@#*WIhAX3QNGS2kw^rM;!!3lMmteNAcU2m$B;M{r{i+G7H`M9@m!*"
    "mK$2JzP2njfC8n$tl9tkLdYqxM@$4)s=TQ+C88Ip*#FQwCCD9VAVn^(WV-b<!QcY@0zJwN-LaAUCZVQM^$#J<YFXgb3Qjj8A"
    "!b?m^EGZ>Kwbh#1Rh66Z4WdyRs|i|MYik1y*9-bqpOnYO)Syk&GAzVqZNYYJ(V;4Mm8pu=+bU8sYteeOj<|%&cww*S6>gC>)"
    "~4H1yW7S)(T><*yJ!#ZF+IK~_NqO^FZwe-)EE2JJ~qII><Aw-<J4Fjug8%|d!kH{S#l=N^q{kdFR_)j@>iiXvWafB1AdRZ<o"
    "_Q*gi{96kb=h<C?YE4pp2N`lLa3cAQNPUERoeI6C@gfT!bMRQ8b1o&=e%3fGTJS)lmbjqPJ)V5;Hy}hQKI{#W*aENtldjn2E"
    "Kq(J4bD9)cW&aUPF8Ns|J3(s2W~o}}t=rU*zCOK^}ZiI546s6o0=5{GnUAYTPY7(!vEgwYfWDT`C-hn(3|n_5vv3Ju{Q2J+S"
    "k4MPYWr?d2&UY(LhG9gG`nBkcyWH1FOEHDaFVsyrUJhqt5DU%3`u>_=&WjRQu#LAG)HalbIEE>kcWS9wy;VR@5;|Rzq%W;rb"
    "iIX9*8s|c4Q6A?RUWDXw5%nRvVMwnL?Vs}7fc)N{5=_J?NHH7d;_<iyY1Sakt2mm#6HG#cOnZ>(WU`$+JR~~@*?yeta(bCYG"
    "qKD*gJh{J4H-AHgX|`In;Yk-d_3RH5Avf^=1DOGxetr{lk68n1@eC*>Y@QR;61qlOd=#oVkHjlL6T%iJKe+vt^$X<2p4h%5$"
    "*z$3Ahbb=41gbM3QA$gFBhYsDdjD+={5&!M)H$xu|{5)flBZTn?+ss-`wo94-gbh|~3Oa6MT~(qv78D?)W#XLMc{;g*oHTt1"
    "dj12-5WVTeZ6=oo7QF)6cc4$OpgYpvnJI9swcduhiU(J4571+D(sr5V+FwO_r5drQ@C>QlJ42;7_KDc;sYZ(FzNCfPDt_15F"
    "tBidA(ZFB8-I}cYVx3zW~Zt>7Qw$TpWAv+A*q~38lNH^YXce~wH_waC`;fEU?!j;PY&X4w6ePlol(u2yNJ?IV&19F%gwMT=|"
    "d~_J0<HwgPj;(QTj7*XfcVbP4aJ>XvuQs!1xnLYj18J@=_6v2%-&OCB6}F;Q^eVo}uU0F4?X353+1Q5K<TvfjY9nrgt+!w7="
    "|lXGJY)~6!vSu-ci+Fy9`nb^@p%0IyZ;8#d<g?q$PPLFKNR?W23V*A9PplyV2TFl8r^;$5%MP{6fyOI3qFuxhHZWz9Wr?C2_"
    "bGC7~udV>bQ3zMIRpmEdqRjuOCeGm>Tqn8xcYPcBF~yi62Em1%{Lfldyp#F0iCa_{0EwH6vChu8`zobMe3yg)EUeX^>U21C$"
    "v*;ml*oL@41zn*511MM^z+%>?GuC>OZnQ?n=J35WPlG?V}WDWOtG4;i5<uxJb{V!?n(;8C8|=;aS2QsyO0vKR-rRA)Tq_Qa<"
    "C$(Rdf&1|1giav2F!V18uB%5ZlCt?*@6{uBaP1a^>tPA|=vOYUtC&01C6bk{x_;4be0+uOZJ#2(K;a+(B5~@Ww;bh|MiEhOc"
    "-^!fH*<9_!xi05(18&02xYdbyBp(9qg?XNj@(Df#1T63hU*dJ%;H!Lx@9|?`A`zh?ERZoCks@+Li?k!h6C=rJ2sp_{qtOJgv"
    "Jh3GrKk?ftb+A>z)cLuNeQgL32{LZWI+>}!bZSjOiYYfPiXp>rIEM*JWa>*4@@n`&A1C>9mQwy;{#p82|kek#ugGvLQfcpYN"
    "C_qCC0#88i<=s=96+#OAeBw2lkSw5b&2zMN^4X3MgDiDXCIQPZ_Cds*~!a#=vDFO{Lj1myQFW<+PS=q}xDgJi}zfj02=5vTT"
    ";iN?AFpWk=a#7R})~CKu%Bd@}F;Kw`&E%+7otwJp&Ba@U`*I}jJ*THL;b;Sosyjwhw`iRDE}1)i5BQ?jA!xIp$Uuzes+q?xp"
    "OLU_IqEu?_*3bY`-U=*r_PNDaN`SgkUkrVfma$3%w=wFmoFhE&0Wm~SvF1Vm8`|?1ZfD=|HE09VE%n(+1C8{J&hA1eCQc`rq"
    "P^wBx=_oyA49>ucM3E}8MXnexN+*A`i@TFULST__i7!P<iBbxDQUIfrN;+7jTI!X?U=~azR0{mUsc}_0S*ESdRrChGVQ$2i*"
    "d}u7Ye_BrV4b3-f_ciCso7dhbHPDf&4)HO(Pk$bk$MP>6b2_n^@N@}nMu)0x~>~~RqyCMeGH}|%2b&xbLDth0&8jIX1RSb7i"
    "omRUSWebqTsL;Sgc?uM#<0(<K(lRF$SYyCIMDsP0oy)k|~=S7!I{?i?K462#&*S!ls~0a&{bSCxh=QcH2fB++o0aNJXglmBY"
    "z=B)BhJ<*U(ZqM8B=D%Da|2NzbWz3LcTh}DQ1Rby*hEnbsqa!sqXYs(s5XX;|zs;^J2lyX^@bK|b$%C6?NUDU(9$L758ZoR3"
    "8G-eI-7Qba~z1zht(#$stt@TSRDu74R4<0SI&9>dHflvMRq&++NGz2~kcX(*JiB1a4TIeX968P2VbUMAxxN{GlCAxH%?Q&hI"
    "D|fY%Ysp^d!MD*~0-RguDZNrp?-^j<POsM+gMl%h@F}15IX~`8;A72i`y(Ii<9()|gZ_*Rhygp`2GT$tXoJlF9pXcA=z*c_Q"
    "DxK}ZBB*`fuqA?ejGh@?7~<Xm&W?o7+1#~@b(zYO-$GcH<2dtM4MD5=oFtaQ*pWnlVjj=YR1mES$rm)tlpl@XJ~*2Odtk}U>"
    "zXy;@q913w*&WG7E8Wzd)Aivb-FF>j^MDw@QNRrIidlezQ8R#I?7^HuNUB$%6B{o55zZIc(4^zGb%JcDUVck)5#9p#fwMn}Y"
    "%7r;hY7eoP*-$H9aDaU_IXAlC?kgu(ww<gLit!2VAmCFBOtPwuaP{r?v7o|F4~$PgJLQ|SL6Mm~z%BcDM2HS!GddE`0d3&_7"
    "kzKdL-uLA%7F#1;XZK#C49j%}(^dF<YhCYXW3H=T9+vtBqQS1z?PlNYghDEU$_UEwIU|CGW3McoMu@3e=YykG3U<>Ti*wfgv"
    "*jKP`VE+O86AV2g&a!9PnQ_)Q`$uQ~*$ZdCbB5p;w1bONKZxK0p2Q{msVB|A#{Vw<5ApZlZM+Me;6u;~ruawk75;Jj8T>i?O"
    "Za#3|B1hncrEc1@lNpn&k@fMpCNvO_<b-xMbacozKqP0e~Em{X<2BbL%L)G?EgM;KnCQI{51JI`63xTf6e(@&c*ZMdHMX^=f"
    "80NE9d|G{KfM>I>)JN>Xp>1sMk_IO#K`+ralVm<CE0CpgvFiKJ49G=#3#W^sdl*LZ1sg7y3fz>miy>&~Ktex=35}yXjw`@90"
    "m{&(eQLQx`A0c=^R!E(#aU#o^*NFMjueyG&hXF5h^mU;fPHhc18Z^6QtseVKZsJZe4q@T1Q>`s$;zE8^<>in@wj<*%%(>ec9"
    "KcXhma`s&M9FJAr86?>hy7OxA}#`WSFLC{kJJckYl1q8W7t{?|2!XvMEXo9ana>#3u*CTI0-i-VR@>dbi2m;WDbg0N*gLe31"
    "$U6}S`AKMpKZE>z<h_uQ4)nwKLqq%k@<C{c0kS|of^48E{!>WH$B<7U{}TBO@;vfo<SWPv$TyG|k>5ss5BU!ApOF8K{14=R!"
    "7p@yUZX6^!J3StuSRp|o1ja|sD_rIN&YxmgC_Ym(SLycEZRqh=m*dxdPIL6eHwih{Ve(w^ab>{&==9~p#K^EEEM`B4oM4P7u"
    "X~08e_09CP3PL2zwp&=dr(ly#+ESVNXHlEMY&2>6nfEI99`Mu@?3o?B`F*^cS%YVPj~aci0O1C)mfaPeLA_!9I(99(xY^BKB"
    "46YuMMZe~*0&`(y08*coJ#KD#^<&R%hrJj*~%Uw0;*mCoLArk~kom9ysA_-uCe%V*oO{n;~TpE-N(><edKJ^SX_x6c0f?7NU"
    "+6hFfW972QB_$7XYv-r#KmqXu;LF0Wjp2o9y9{(%&oA9^dZ+m!ac?bU2@iJ~g^Zf~EzRgqfeLp_Ie+hc;N1^$C4F3fF>-fLI"
    "pT?iXKZie$zkvTH{tf&^{CDy1;D3Un#5utbFC${aD~Sa07UFHthE-_7e}kwJKSjLf)P&y;J^16qKO;UzJWu=<@pa<c#CHe``"
    "tSw$h`c7lq(Hucd?lGAQ{-#N9QhZ?H<J?i6!hdDg`WIl(35|fd@uR)WSbm8TfQSdLLSIx$mhr}kzXbM4f!?l>*Tk{Z<GI#{4"
    "eC6l4s|k^Q-glxp1C8fBpFz&!zLy`OUd`UO9Kq|MvOMo`3Lseg4e(XU@NJ{=)e;A*?v8dj@*<%c&TZpt97Pr~>tNXx;CC)@@"
    "TiNxh3|QtzfZ)cdFb^^4Sm`Y_zyC#YYgK1F?&dY<|s^%d#`>KoKIA@o>?3%x2754{=M_}ih4|DDhWLLUiz5^nO#aFgE-{Xqz"
    "$Df*HQ({VaQzXrPbU#5SAmguKwg}$M6x<bE~Zqq~hm*@rkEA+?UVn0tmM}Lj}J^Bym|3?2Qjb7jv%th=Xb8&NFT{JI#>SA;8"
    "?8Rp<UbqNdUR*x96fR$J`T9%oQoDTT<=?v;U4G<pbNTVhU%mX)<<pm6y8P<p?_BbaUj66|kHkk$J^G19KmEvmw0iXXqc1)}u"
    "5h?<<|=&kLs#*u*Im8gs&J)V8CUPR@~%2py{p012d^eqi>v#qXRrR<)i<yH@Cv;qt}m{c>+E&;x_;fgUS2<a{k{8-fAapP0Q"
    "U{VLcA042gnGncm+3nfVBs~IbCN272rbC!1yAn!fl#B`Wot@pnudyC+G~Fqr20_d(3(s7G4r4pT`uqGzW9BCR|wef%5^jgbU"
    "kX2keNkI0qb01I1Oyb_I7~(@pRtzJni(!;T{fo`^zfbA(7J#0{)BoiJd(S%d@0trH$`OSFg%BsU-y#2v9Fw#1Iu6ZZrMd6h^"
    "RI9?`A(uRE2faXooCnw~LT%Pva<5wddmRu4tm8TR+r!2~Y{nmvXji>-pw4n~L<cJUpxe-FCP&y=qG{}t^s)gK8Gc*a!Li5lv"
    "v;&+zP7Y1;keokTbqeIgp=-1UiRsclJ)lQ)K(FWxeV~st!>|m;2(a?fjKs){#+Z!F)EF1`U6YwGGiDCUZpWZ3&XR11W!Nywv"
    "r#s|rq~>-us5*ibl7wTtU8Nz*edI>J$A|l?3&%OY?up2!fDuZ#jqMKht04Zu7uriBkYGK;aPYd-i1+)<U+9QcrFUtF2QAB*("
    "tE>O56>na|UcXi*vX-=W(}Oj~jAh*meQ8;FjDSx8}Coj=SeDp5SSo<vG}S5nkZqe3DP|Sw7E8ybOD<2z###i_hdO-r*~Jjdy"
    "vEZ}3gN&39n~`uu<&!4jPCGd|$w{F1-pSNw+G@n{5xbx20|NF)-C#3G4ECL%@(uo9I>DRL9hBWA>k*bygEi?|UlavNzzT9JN"
    "a6q!bX$To5xVWW{~Ix0owXfdirwWt}jqZL??wWu3yM4M4RI*HDryC@@s1zv~=2_Y>MU`r}ONzesDFa=9+go;oVJfS5Fg^4f~"
    "0%0Mng}rbugkq6cDwc`Kv0_Y(X|Zz5jM=eTtPyL*{MaNmkKLVi=;Jp%9u{a4HfR=Bs1n!XPP`WPPH)u%*r7pu72m{n@dNBpB"
    "EcrOgpf$X7L^lf!c5qSN}`r<6JDZ`@L`kA6U)RdfhH-~rfiZ=#vc}{lGKw{(n)&B&S|Mml0kBn+`wWzCW#c6ill^8IwiwWEv"
    "D2|Ic28oR3+6&`Kd{2mRhFPsU5_dPbbp3w3t@XrL>+l(q`I8*VA75Ha$#_)3bDtUZn5R>-09gPv55rShL}bkV$8xjG8es)l4"
    "nZ%=9w-%s6ug8y7phNAlTtHkr+4^I0XUXN|0vZD+gL0j%Ctc9T88_6_CO9G4Sv>0B|V=E^xUSIfD%My{FjbK~4Rx6EyGyBw0"
    "o@>HJA$6+C7^ZC4z*Yj51$$R<s!y9LiU*$LXL;jd2L{^N5X;Br+qAA*9MXZUg*bryp64vn^Y7Hvk5-EkGu*AbYj!H2pA!VeT"
    "q(~*{M$#n%_OT^7QbqElTd5^=q@L85#?n*@U?s1mjYJgK0#}F>(gmqdE|`T%!7Vfk!@{hvg9^jLHqOb4T#|2OT{d77Td;}iv"
    "M1llEx9B2<)J*5r*Z(xcrD+<I>r=2p%qr)U>!#kL5VAAC9g<|3=6rasET%4$);i{w&Ex?#Z^3|p){2)Y-V2>C=+F-1j<}lDt"
    "F3GIVeX3g%urw4b2y$#aJ;>OcirQu~;Z7#S$!Py;v@qMXTr(>qW14TkI75;;1+)2E}!8Tih3k5(_&!R!YOhR!dsREZL=6$t^"
    "WX&5~c5lxC%QX<6EpP}tj~N~;VkZeES52{ol=R8dvb8&y}!s-c>yr8;U=t*f5eP+MwW9ja3`fK|Rw*XmZ?tM_W;M!qTDs5j<"
    "~eN(w{Z<;r=o81kn;jq?8Eu@7tUW;i7Ev4l&QB$;%rfUW)bxU(JPrKFn+E5F$g|^bx+FrW{QBbhfX`R(M*y|Bk?1CQG(|ShF"
    ">Umw#WmxV-UDY*M?`7EUrf%uB?&uZ0rn|bQH}t07)qQ=U&-6f_>q~v5@ARXNmdSFs%$H;3L^)M1l$G*LSuY!9vuu@}a=q-8{"
    "qndxEeGXg`L4Vz;|5`{1_!G@0=r*;<)1dPM&6JN8P<Q%P>mZyJG}vzhGp1>V^oZqQ8!$}Ga5$IXd44#WK4{i5g2o0X{?Q{u`"
    "`YaYGNjC5+-SeOvYr*u*sRc88HPjW+u#(nKm<K&J<0_ESR#Xm_@T>s-|Y@X4y1M)3i+6bj*rbHEX78dS=7CHJfJ3?3g{%H;3"
    "lP9Geq!W(MZmT$oF9ZEnq-xi{}k#6m61!Y$IGtdPZ8oW)yFOR(Zr!b(~xD{W=0td+AQOR<Vp$x^KwOS5#VY#EkmS(a@%R>i7"
    "WuH{)xt84jI-x^p$Yh+EVz`C<G*3Q~n2kYL#ZNet)kj>b<9kmm7-d60AePipkVVkyP+qPp@?YiySp53*F_Sl}<fxWQT_Pvcd"
    "m_s<U!#bS9I}t~4(vIZFj^Y#@)zKW?DLaN^I+kNQj#F`Jj_Y_%!)ZDl$9IO##F;sPGj|rw(%Ct9g{ttCSS4ObS2C4cMX8i3Y"
    "DKS@6{})boJzgoRc<S-N~bcaOe;ZUURhM`D(ebS<*JdYP)%3ms#Z0tR@JUns<o<HZB(1pPIX@0RnZz=BWs~rxW?BKwPY<*%h"
    "i;cTGMN0&8j&yuhyuwYQ5U1HmwD<b!}g}ud($=U8sw7sa~v`b*paIt98FVsn6@XI_rjA-i^31H{oX7oGZEoS8+@3jjOwcYr2"
    "-}xD~hR)?Lr-xxPDe$L`dfxq&-(7w(<AcDL@mOL&w=d#uNM5l`@BPw|SL>S><t8J_7`p5xU#*YmuF*Yx_{&>MLZFYxBx(!29"
    "E-p<>52M=q68hj(($TYHzTtjRqjZ)*Lp*M_%*{~XRqtd80yvA*#-RL&_#;7rC%o~fwvaxDx8~etw5xEs^)3?%X`PRIx+}3WJ"
    "xBl(qc5%DEMVok&Y4XiPGu6yAb4{@+HI-(uS!(J{qiHs+rqir8y=JS~ZT6a@X3$(Wx6NJizR9*Ct!PVX$t|^|wak{?s<hme*"
    "J`%<tyyc)x@+xEFIZHYZpYincD9{wD{ZZ<w~e;dcG}+Qd(fagY6tCAdvp3SM0D5=*NJq5PP!v?<c`|WI^~Ypu{w6g>A0Onr`"
    "hp4!_KTT?<_mJ4${TCRG04Z-FP?I&35x$y=!!xu6O#PH0X}HL3h>NbPwHQm+J{VsVDdJp4qGPYCX5t?9F=19_okuu+RH3KjY"
    "_o(U*M1FZsG}_@;09j$iRTzv18dEx+UU{JuZ*$Ntn0{Dr^w*?y!i^wWK*FZb2{O<(JqeWzdP*ZPfqtMB(G{k#6Qj|{K@HJ}I"
    "lAU;SAvV;6U8YlyOU<{mrH)x)|X$=OWK`>YiHiN_9I3R}PkR5Wv$S^&WhVrmDREOHIJT!-uVQuIR{o#DL9PWn52pdr&dc=?7"
    "qvR+%%8!(hJ~Bqus6FbA2BXm^7_CN|(P4BP5o2~78Ar#$I6aoe#j!dz$M(1~ZjM`He>@q_#`E!Vyc?qvd_qn_6K29sqLbJpF"
    "-c7_liWm{C=+d>PmGB<u_n%>KJg~KNq;h(1e3*NJ=sq7lluuVWvAR!n5L)lv^Z6#+O#}1r}nflZBG5^Y&xIbPth4ZBWKKvpG"
    "9YxnK-+d=`&+y&a9a|b7s|9ZC0Oov)-&fo6cslV78d8XZJHCAOb3&114YtF5rVmAOwjZ9pr+1AO&)u1jRrNv_KEaff1O271)"
    "6jRDxRI242tznn5S<gF!F}rok)-f_bnE?t)dY33kCDI0on(pEGlQF3jWe%se+&=B2qh*XQNAIk)D{+?(IdyYt?BI3LZY^VvL"
    "@Z|D2@{hU}t7Q!OEkQT*-wkR*mg|(<G+=aLB7n8+&v0UsH_>x?PmdrA|<d@N9Y#CoBmZ@cCDJ~03Wm#I@EcK<aG?&)WS=N`{"
    "vaxI}JImg3yqqqB<=t|<+%Jhc{w{qd-xcrFJMGTAv+rtm{@vtmb{E{upM2BgSMgPHm0jgm%1U1uD{JMf+N<truo|s`)oQg_9"
    "ahH`u@0@-HMfqeg>`IQT&rt+ZLaNgWnEjlYkxgnPuKJHa{c(5D7|4e!oy3cve7rz#@TqA_QR`buvu+3o5SX~5w_{Aw3WBo*4"
    "Ua`dt2Gow%)d}z1=pq{+8T@cFZok<9E?rW|!L)cFIoQ89Q@l?VO#rYwbF_-p=3kcf;Lu7wi@=KG}U_AKNGP>Ak!!?r-+xy}7"
    "sc_P)BW@B91lKG@Iq%l&%4-S79v0XtBK|MSH*f6x!c!8$mH_Mv+i97c!WusUoGhr{te+;jKBed0cSFWqbR=6&V9cHg*f-jDC"
    "+_s9`D{@<70{82v|N9))=c8`PO=olPV$IbC@JRbiyb?odL"
)
"""A 16-bit word for each vector, the first level lowest: compressed, base 85."""
