// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A synchronous parameter-server burst over ns-3's own TcpDctcp: every worker pushes its gradients, split evenly over the servers,
// and each server sends its part back to all workers when the last push to it is in. One connection for each transfer, as the
// papers' flows are. Or over PIAS or pFabric, which are the same with other queues, marks and windows, or over NDP, which is a transport of its own. Completion: from the call to the last byte at the receiver. Prints one JSON object.

#include "burst.h"
#include "ndp.h"
#include "pfabric.h"
#include "pias.h"

#include <chrono>
#include <functional>

using namespace ns3;
using burst::PrintTimes;
using burst::Settings;
using burst::ShapeOf;

namespace {

void Configure(const Settings& settings) {
    const Time rto = NanoSeconds(static_cast<uint64_t>(settings.rtoMinUs * 1000));
    Config::SetDefault("ns3::TcpL4Protocol::SocketType", TypeIdValue(TcpDctcp::GetTypeId()));
    Config::SetDefault("ns3::TcpSocketBase::MinRto", TimeValue(rto));
    // The defaults of these are for wide-area networks: 1 ms of granularity alone would be forty round trips.
    Config::SetDefault("ns3::TcpSocketBase::ClockGranularity", TimeValue(NanoSeconds(100)));
    Config::SetDefault("ns3::TcpSocketBase::MaxSegLifetime", DoubleValue(0.0001));
    Config::SetDefault("ns3::TcpSocket::ConnTimeout", TimeValue(rto));
    Config::SetDefault("ns3::RttEstimator::InitialEstimation", TimeValue(MicroSeconds(24)));
    Config::SetDefault("ns3::TcpSocket::SegmentSize", UintegerValue(1448));
    Config::SetDefault("ns3::TcpSocket::InitialCwnd", UintegerValue(settings.initialWindow));
    Config::SetDefault("ns3::TcpSocket::DelAckCount", UintegerValue(1));
    Config::SetDefault("ns3::TcpSocket::SndBufSize", UintegerValue(4 << 20));
    Config::SetDefault("ns3::TcpSocket::RcvBufSize", UintegerValue(4 << 20));
    RngSeedManager::SetSeed(settings.seed);
    if (settings.transport == "pfabric") {
        pfabric::Configure();
    }
}

fabric::Shape ShapeFor(const Settings& settings) {
    fabric::Shape shape = ShapeOf(settings);
    if (settings.transport == "pias") {
        shape.bands = pias::Bands();
    } else if (settings.transport == "pfabric") {
        shape.makeQueue = pfabric::PortQueue::Make;
        // Packets of a flow need no order where a timeout alone sends again.
        shape.perPacket = true;
    } else if (settings.transport == "ndp") {
        const uint32_t packets = settings.ndpPackets;
        shape.makeQueue = [packets](uint32_t bytes, fabric::Counters* counters) {
            return ndp::PortQueue::Make(bytes, packets, counters);
        };
    }
    return shape;
}

class Burst {
  public:
    Burst(const Settings& settings, fabric::Network& network) : m_settings(settings), m_network(network) {
        for (uint32_t host = 0; host < settings.hosts; ++host) {
            (burst::IsServer(settings, host) ? m_servers : m_workers).push_back(host);
        }
        m_missing.assign(m_buckets.size(), std::vector<size_t>(settings.hosts, m_workers.size()));
        m_nextPort.assign(settings.hosts, 1024);
        for (uint32_t host = 0; settings.transport == "ndp" && host < settings.hosts; ++host) {
            const ndp::Settings own = {settings.ndpWindow, network.HostRate(), network.Spines(), NanoSeconds(static_cast<uint64_t>(settings.rtoMinUs * 1000))};
            m_endpoints.push_back(std::make_unique<ndp::Endpoint>(own, network.hosts.Get(host), &m_timeouts));
        }
    }

    void Start() {
        Ptr<UniformRandomVariable> random = CreateObject<UniformRandomVariable>();
        for (uint32_t worker : m_workers) {
            const double late = random->GetValue(0, std::max(m_settings.jitterUs, 1e-9)) * 1000;
            for (size_t bucket = 0; bucket < m_buckets.size(); ++bucket) {
                const uint64_t after = static_cast<uint64_t>(late) + m_buckets[bucket].readyNs;
                Simulator::Schedule(MicroSeconds(100) + NanoSeconds(after), [this, worker, bucket] { Push(worker, bucket); });
            }
        }
    }

    void Print(double wall) {
        std::vector<double> all = m_pushes;
        all.insert(all.end(), m_pulls.begin(), m_pulls.end());
        const size_t expected = 2 * m_workers.size() * m_servers.size() * m_buckets.size();
        std::printf("{\"simulator\": \"ns-3\", \"transport\": \"%s\", \"hosts\": %u, \"bytes\": %lu, \"rto_min_us\": %g, "
                    "\"jitter_us\": %g, \"oversubscription\": %g, \"unfinished\": %zu, ",
                    m_settings.transport.c_str(), m_settings.hosts, m_settings.bytes, m_settings.rtoMinUs, m_settings.jitterUs, m_settings.oversubscription,
                    expected - all.size());
        PrintTimes("flows", all);
        PrintTimes("pushes", m_pushes);
        PrintTimes("pulls", m_pulls);
        std::printf("\"step_us\": %.3f, \"timeouts\": %lu, \"overflowed\": %lu, \"trimmed\": %lu, \"marked\": %lu, \"events\": %lu, "
                    "\"wall_s\": %.2f}\n",
                    m_lastEnd, m_timeouts, m_network.counters.overflowed, m_network.counters.trimmed, m_network.counters.marked,
                    Simulator::GetEventCount(), wall);
    }

  private:
    uint64_t Shard(size_t bucket, size_t server) const {
        const uint64_t count = m_servers.size(), bytes = m_buckets[bucket].bytes;
        return std::max<uint64_t>(bytes / count + (server < bytes % count ? 1 : 0), 1);
    }

    void Push(uint32_t worker, size_t bucket) {
        for (size_t server = 0; server < m_servers.size(); ++server) {
            const uint64_t bytes = Shard(bucket, server);
            const uint32_t to = m_servers[server];
            Transfer(worker, to, bytes, m_pushes, [this, to, bucket, bytes] { OnPush(to, bucket, bytes); });
        }
    }

    void OnPush(uint32_t server, size_t bucket, uint64_t bytes) {
        if (--m_missing[bucket][server] == 0) {
            for (uint32_t worker : m_workers) {
                Transfer(server, worker, bytes, m_pulls, [] {});
            }
        }
    }

    void Transfer(uint32_t from, uint32_t to, uint64_t bytes, std::vector<double>& times, std::function<void()> then) {
        const Time start = Simulator::Now();
        auto ended = [this, start, &times, then] {
            times.push_back((Simulator::Now() - start).GetNanoSeconds() / 1000.0);
            m_lastEnd = Simulator::Now().GetNanoSeconds() / 1000.0 - 100;
            then();
        };
        if (!m_endpoints.empty()) {
            m_endpoints[to]->Expect(m_nextFlow, fabric::AddressOf(from), bytes, ended);
            m_endpoints[from]->Send(m_nextFlow++, fabric::AddressOf(to), bytes);
            return;
        }
        const uint16_t port = m_nextPort[to]++;
        Ptr<Socket> listener = Socket::CreateSocket(m_network.hosts.Get(to), TcpSocketFactory::GetTypeId());
        listener->Bind(InetSocketAddress(fabric::AddressOf(to), port));
        listener->Listen();
        auto left = std::make_shared<uint64_t>(bytes);
        auto receive = [left, ended](Ptr<Socket> socket) {
            while (Ptr<Packet> packet = socket->Recv()) {
                *left -= packet->GetSize();
                if (*left == 0) {
                    ended();
                }
            }
        };
        listener->SetAcceptCallback(MakeNullCallback<bool, Ptr<Socket>, const Address&>(),
                                    [receive, listener](Ptr<Socket> socket, const Address&) {
                                        socket->SetRecvCallback(receive);
                                        listener->Close();
                                    });
        Ptr<Socket> sender = Socket::CreateSocket(m_network.hosts.Get(from), TcpSocketFactory::GetTypeId());
        sender->Bind();
        sender->TraceConnectWithoutContext("CongState", MakeCallback(&Burst::OnState, this));
        if (m_settings.transport == "pias") {
            pias::Demote(sender, m_settings.piasStep);
        } else if (m_settings.transport == "pfabric") {
            pfabric::Tell(sender, bytes);
        }
        sender->SetConnectCallback(
            [bytes](Ptr<Socket> socket) {
                socket->Send(Create<Packet>(bytes));
                socket->Close();
            },
            MakeNullCallback<void, Ptr<Socket>>());
        sender->Connect(InetSocketAddress(fabric::AddressOf(to), port));
    }

    void OnState(TcpSocketState::TcpCongState_t, TcpSocketState::TcpCongState_t now) {
        m_timeouts += now == TcpSocketState::CA_LOSS ? 1 : 0;
    }

    Settings m_settings;
    fabric::Network& m_network;
    std::vector<uint32_t> m_workers;
    std::vector<uint32_t> m_servers;
    std::vector<burst::Bucket> m_buckets = burst::BucketsOf(m_settings);
    // Pushes of each bucket that have not reached each server.
    std::vector<std::vector<size_t>> m_missing;
    std::vector<double> m_pushes;
    std::vector<double> m_pulls;
    std::vector<uint16_t> m_nextPort;
    // Of NDP only.
    std::vector<std::unique_ptr<ndp::Endpoint>> m_endpoints;
    uint32_t m_nextFlow = 1;
    uint64_t m_timeouts = 0;
    double m_lastEnd = 0;
};

}  // namespace

int main(int argc, char* argv[]) {
    Settings settings;
    CommandLine command("A synchronous parameter-server burst over TcpDctcp; prints one JSON object.");
    burst::AddTo(command, settings);
    command.AddValue("transport", "dctcp, pias, pfabric or ndp", settings.transport);
    command.AddValue("pias-step", "bytes for which a flow of PIAS loses a priority", settings.piasStep);
    command.AddValue("ndp-packets", "data packets that a port of NDP holds", settings.ndpPackets);
    command.AddValue("ndp-window", "packets of NDP's first window", settings.ndpWindow);
    command.AddValue("rto-min-us", "least retransmission timeout", settings.rtoMinUs);
    command.AddValue("initial-window", "packets", settings.initialWindow);
    command.AddValue("per-packet", "spread packets, not flows, over the spines", settings.perPacket);
    command.Parse(argc, argv);
    const std::vector<std::string> transports = {"dctcp", "pias", "pfabric", "ndp"};
    NS_ABORT_MSG_IF(std::find(transports.begin(), transports.end(), settings.transport) == transports.end(),
                    "there is no transport " << settings.transport);
    Configure(settings);
    fabric::Network network(ShapeFor(settings));
    Burst burst(settings, network);
    burst.Start();
    const auto began = std::chrono::steady_clock::now();
    Simulator::Stop(Seconds(10));
    Simulator::Run();
    burst.Print(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
    Simulator::Destroy();
    return 0;
}
